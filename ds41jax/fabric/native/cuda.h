// The coordinator's GPU side: mailboxes that the card writes and a host thread serves.
//
// The driver is opened at run time and its few functions are declared here, so that this compiles
// wherever the rest does and needs no CUDA toolkit.

#ifndef DS41JAX_CUDA_H_
#define DS41JAX_CUDA_H_

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coordinator.h"
#include "expert_worker.h"

namespace ds41jax {

using CuStream = void*;
using CuFunction = void*;

// As in exchange.cu.
struct MailboxLayout {
  uint64_t size, codes, scales, ids, weights, sums;
  uint32_t boxes, capacity, hidden, choices;
  uint64_t patience;
};

// Enqueues zeros on the stream's device; why not, or null.
const char* clear(CuStream stream, void* data, uint64_t bytes);

class Mailboxes {
 public:
  // `image` is the compiled exchange.cu. Throws std::runtime_error.
  Mailboxes(std::shared_ptr<Coordinator> coordinator, const CoordinatorOptions& options,
            const void* image);
  ~Mailboxes();
  Mailboxes(const Mailboxes&) = delete;

  // Enqueue kernels; why not, or null.
  const char* send(CuStream stream, int source, const void* codes, const void* scales,
                   const void* ids, const void* weights, const void* numbers, void* ticket);
  const char* wait(CuStream stream, const void* ticket, const void* rows, void* sums,
                   uint64_t bytes, void* fault);

 private:
  void serve(uint32_t box);
  const char* launch(CuStream stream, CuFunction kernel, uint32_t blocks, uint32_t threads,
                     void** arguments);

  std::shared_ptr<Coordinator> coordinator_;
  MailboxLayout layout_ = {};
  uint8_t* host_ = nullptr;
  uint64_t device_ = 0;
  CuFunction send_ = nullptr, await_ = nullptr, take_ = nullptr;
  std::atomic<bool> stopped_{false};
  std::vector<std::thread> threads_;
};

// A worker's frames on their way to and from the card, one at a time.
class Staging {
 public:
  explicit Staging(const Geometry& geometry);
  ~Staging();
  Staging(const Staging&) = delete;

  // Waits for a frame on the host, then enqueues its copies.
  const char* receive(CuStream stream, ExpertWorker& worker, uint32_t above, uint32_t capacity,
                      uint32_t timeout_ms, void* codes, void* scales, void* ids, void* weights,
                      void* place_layer);
  // Waits for the stream, then sends.
  const char* respond(CuStream stream, ExpertWorker& worker, const void* rows, uint64_t bytes,
                      const void* place_layer, void* done);

 private:
  Geometry geometry_;
  std::vector<void*> memory_;
  uint8_t *codes_, *scales_, *rows_;
  int32_t *ids_, *place_;
  float* weights_;
};

}  // namespace ds41jax

#endif  // DS41JAX_CUDA_H_
