// The worker's side of an exchange: frames of any coordinator, oldest first, and answers to them.

#ifndef DS41JAX_EXPERT_WORKER_H_
#define DS41JAX_EXPERT_WORKER_H_

#include <string>
#include <vector>

#include "frames.h"
#include "hub.h"
#include "timeline.h"

namespace ds41jax {

constexpr uint32_t kInbox = 8;  // frames that wait or are computed
constexpr uint32_t kPeers = 4;  // coordinators at once

struct WorkerOptions {
  Geometry geometry;
  uint32_t group;     // whose routes are computed here
  uint32_t executor;  // who answers
};

// A frame's rows as the step program takes them; rows past the frame's end are zero, with id -1.
struct Work {
  uint32_t place = 0;  // for `respond`; 0 if there was nothing
  uint32_t layer = 0;
};

class ExpertWorker {
 public:
  ExpertWorker(const Ucx& ucx, const char* transports, bool spin, const WorkerOptions& options);
  ~ExpertWorker();

  std::vector<uint8_t> address();
  // Lets a coordinator in; its place, or -1 if all are taken. Its frames carry `token`.
  int admit(const uint8_t* address, size_t size, uint64_t token);
  void dismiss(int peer);

  // Rows of the oldest frame that is waiting, 0 if none came in time. Bad frames are refused.
  uint32_t next_rows(uint32_t timeout_ms);
  // Takes the oldest frame if it has more than `above` and at most `capacity` rows.
  Work receive(uint32_t above, uint32_t capacity, uint32_t timeout_ms, uint8_t* codes,
               uint8_t* scales, int32_t* ids, float* weights);
  // Sends bfloat16 rows back, [rows of the frame, hidden].
  void respond(uint32_t place, const uint8_t* rows);

  uint64_t answered();
  uint64_t refused();
  std::string last_refusal();
  size_t timeline(Moment* out, size_t size);

 private:
  struct Peer {
    bool taken = false;
    Endpoint endpoint;
    uint64_t token = 0;
  };
  enum class State { kFree, kArriving, kChecked, kComputing, kAnswering };
  struct Frame {
    State state = State::kFree;
    uint64_t order = 0;
    int peer = -1;
    Buffer request, response;
    Transfer received;
    std::unique_ptr<Transfer> sent = std::make_unique<Transfer>();
  };

  static Target accept(void* self, uint64_t token, uint64_t request, size_t size);
  Frame* oldest(Lock& lock, Clock::time_point until);
  void sweep();
  void answer(Frame& frame, uint16_t status);
  void unpack(const Frame& frame, uint32_t capacity, uint8_t* codes, uint8_t* scales,
              int32_t* ids, float* weights) const;

  WorkerOptions options_;
  Hub hub_;
  Peer peers_[kPeers];
  Frame frames_[kInbox];
  uint64_t order_ = 0, answered_ = 0, refused_ = 0;
  std::string last_refusal_;
  Timeline timeline_;
};

}  // namespace ds41jax

#endif  // DS41JAX_EXPERT_WORKER_H_
