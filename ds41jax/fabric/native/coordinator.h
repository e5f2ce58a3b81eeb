// The coordinator's side of an exchange: waves of rows out to every rank, partial sums back.
//
// A wave is one layer of one step. Its buffers are registered once; a rank that fails it is closed
// and stays down until it is attached again. Where experts are replicated, the rows of a wave that
// lost a group go to the groups that are left.

#ifndef DS41JAX_COORDINATOR_H_
#define DS41JAX_COORDINATOR_H_

#include <string>
#include <vector>

#include "frames.h"
#include "hub.h"
#include "timeline.h"

namespace ds41jax {

constexpr uint32_t kWaves = 8;  // in flight at once: two lanes, and idle ones of other cards
constexpr uint32_t kMaxRanks = 6;

struct CoordinatorOptions {
  Geometry geometry;
  uint32_t ranks;        // groups * ranks a group
  uint32_t executor;     // of rank 0
  bool balanced;         // owners by load, or by expert id
  bool checksum;
  uint32_t deadline_ms;  // of one wave
};

class Coordinator {
 public:
  Coordinator(const Ucx& ucx, const char* transports, bool spin,
              const CoordinatorOptions& options);
  ~Coordinator();

  std::vector<uint8_t> address() { return hub_.address(); }

  // Opens the way to a rank and proves it with one frame; why not, or empty.
  std::string attach(uint32_t rank, const uint8_t* address, size_t size, uint64_t token);
  void detach(uint32_t rank, const char* why);
  bool up(uint32_t rank);
  std::string down_reason(uint32_t rank);

  // Starts a wave. The ticket is for `wait`; below 2^32 it is the number of a fault instead.
  uint64_t send(const Rows& rows);
  // The planes' sum in rank order, [rows, hidden]; 0, or the number of a fault and zeros.
  uint32_t wait(uint64_t ticket, uint32_t rows, float* out);
  std::string fault(uint32_t number);
  uint64_t takeovers();
  size_t timeline(Moment* out, size_t size);

 private:
  struct Rank {
    Endpoint endpoint;
    uint64_t token = 0;
    bool up = false;
    std::string reason = "not connected yet";
  };
  struct Part {  // of a wave, for one rank
    Buffer buffer;
    std::unique_ptr<Transfer> sent = std::make_unique<Transfer>();
    Transfer received;
    bool expected = false, accepted = false;
  };
  struct Wave {
    bool taken = false;
    uint64_t id = 0;
    uint32_t layer = 0, rows = 0;
    Buffer frame;
    Part parts[kMaxRanks];
    Clock::time_point deadline;
  };

  static Target accept(void* self, uint64_t token, uint64_t request, size_t size);
  Wave* free_wave(Lock& lock);
  uint32_t alive_groups() const;
  uint32_t per_group() const { return options_.ranks / options_.geometry.groups; }
  void post(Wave& wave, uint32_t alive);
  void deliver(Wave& wave, uint32_t rank);
  Wave* take_over(Wave& lost, Lock& lock);
  std::string lost_ranks() const;  // all of them, also those that were down before
  void settle(Wave& wave, bool& pending, bool& failed);
  void fail(uint32_t rank, const std::string& why);
  uint32_t record(const std::string& why);
  void sum(const Wave& wave, float* out) const;

  CoordinatorOptions options_;
  Hub hub_;
  uint64_t next_id_;
  Rank ranks_[kMaxRanks];
  Wave waves_[kWaves];
  uint8_t owners_[kMaxExperts];
  std::vector<std::string> faults_;
  uint32_t fault_count_ = 0;
  uint64_t takeovers_ = 0;
  Timeline timeline_;
};

}  // namespace ds41jax

#endif  // DS41JAX_COORDINATOR_H_
