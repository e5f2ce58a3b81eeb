// The transport: UCX active messages, the library found at run time.
//
// One hub a session: a UCX context and worker, registered buffers, endpoints to peers. Nothing is
// allocated after the buffers. Every function but `pause` is called with `mutex` held.

#ifndef DS41JAX_HUB_H_
#define DS41JAX_HUB_H_

#include <ucp/api/ucp.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace ds41jax {

using Clock = std::chrono::steady_clock;

// Served in order of arrival: threads that wait for messages take the lock again and again, and
// with a plain mutex nobody else would ever get it.
class FairMutex {
 public:
  void lock() {
    std::unique_lock<std::mutex> guard(mutex_);
    const uint64_t mine = next_++;
    turn_.wait(guard, [&] { return serving_ == mine; });
  }
  void unlock() {
    std::lock_guard<std::mutex> guard(mutex_);
    ++serving_;
    if (serving_ != next_) turn_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable turn_;
  uint64_t next_ = 0, serving_ = 0;
};

using Lock = std::unique_lock<FairMutex>;

#define DS41JAX_UCX_FUNCTIONS(X)                                                                  \
  X(ucp_get_version)                                                                              \
  X(ucp_config_read)                                                                              \
  X(ucp_config_modify)                                                                            \
  X(ucp_config_release)                                                                           \
  X(ucp_init_version)                                                                             \
  X(ucp_cleanup)                                                                                  \
  X(ucp_worker_create)                                                                            \
  X(ucp_worker_destroy)                                                                           \
  X(ucp_worker_get_address)                                                                       \
  X(ucp_worker_release_address)                                                                   \
  X(ucp_worker_progress)                                                                          \
  X(ucp_worker_arm)                                                                               \
  X(ucp_worker_get_efd)                                                                           \
  X(ucp_worker_set_am_recv_handler)                                                               \
  X(ucp_ep_create)                                                                                \
  X(ucp_ep_close_nbx)                                                                             \
  X(ucp_am_send_nbx)                                                                              \
  X(ucp_am_recv_data_nbx)                                                                         \
  X(ucp_request_free)                                                                             \
  X(ucp_mem_map)                                                                                  \
  X(ucp_mem_unmap)                                                                                \
  X(ucs_status_string)

struct Ucx {
#define DS41JAX_MEMBER(name) decltype(&::name) name;
  DS41JAX_UCX_FUNCTIONS(DS41JAX_MEMBER)
#undef DS41JAX_MEMBER
  std::string error;  // why it could not be loaded; empty if it was
};

// Loads UCX from `path` (libucp.so.0) once a process.
const Ucx& load_ucx(const char* path);

// Registered memory, freed with the hub.
struct Buffer {
  uint8_t* data = nullptr;
  size_t size = 0;
  ucp_mem_h memory = nullptr;
};

struct Endpoint {
  ucp_ep_h handle = nullptr;
  bool failed = false;  // the transport gave the peer up
  ucs_status_t status = UCS_OK;
};

// One message on its way; `busy` until the buffer may be used again.
struct Transfer {
  uint64_t header[2];
  bool busy = false;
  ucs_status_t status = UCS_OK;
  size_t size = 0;
};

// Where an arriving message goes: fills in the transfer, or says why not with null.
struct Target {
  Transfer* transfer = nullptr;
  Buffer* buffer = nullptr;
};

class Hub {
 public:
  using Accept = Target (*)(void* owner, uint64_t token, uint64_t request, size_t size);

  // Throws std::runtime_error. `transports` is UCX_TLS, or null for UCX's own choice; `spin` polls
  // without ever sleeping. If only shared memory is named, UCX does not notice a peer that dies:
  // whoever holds the control connection does.
  Hub(const Ucx& ucx, const char* transports, bool spin, Accept accept, void* owner);
  ~Hub();
  Hub(const Hub&) = delete;

  std::vector<uint8_t> address();
  Buffer allocate(size_t size);
  void connect(const uint8_t* address, size_t size, Endpoint& endpoint);
  void close(Endpoint& endpoint);
  void send(Endpoint& endpoint, Transfer& transfer, const Buffer& buffer, size_t size);
  // Frees a record of a closed endpoint's send for another. Shared memory never tells the end of one
  // whose peer died: what UCX still points to is left to it.
  void let_go(std::unique_ptr<Transfer>& transfer);
  void progress();
  // Gives the mutex up for a moment: until a message comes or `until`, 50 ms at most.
  void pause(Lock& lock, Clock::time_point until);
  const char* why(ucs_status_t status) const { return ucx_.ucs_status_string(status); }

  FairMutex mutex;

 private:
  static ucs_status_t on_message(void* self, const void* header, size_t header_size, void* data,
                                 size_t size, const ucp_am_recv_param_t* param);
  ucs_status_t arrive(const uint64_t* header, void* data, size_t size, bool rendezvous);

  const Ucx& ucx_;
  bool spin_, shared_memory_;
  Accept accept_;
  void* owner_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::vector<Buffer> buffers_;
};

}  // namespace ds41jax

#endif  // DS41JAX_HUB_H_
