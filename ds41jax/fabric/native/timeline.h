// When exchanges began and ended, for pictures of what overlaps: the last moments of a session.

#ifndef DS41JAX_TIMELINE_H_
#define DS41JAX_TIMELINE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace ds41jax {

constexpr size_t kMoments = 4096;  // the last ones are kept

enum class Event : uint32_t { kSent = 1, kAwaited, kSummed, kReceived, kAnswered };

struct Moment {
  uint64_t nanoseconds;  // of the machine's steady clock, which its processes share
  uint64_t wave;
  uint32_t event, layer, rows, unused;
};

// Not thread-safe: the session's lock guards it.
class Timeline {
 public:
  void note(Event event, uint64_t wave, uint32_t layer, uint32_t rows) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const uint64_t at = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    moments_[count_++ % kMoments] = {at, wave, uint32_t(event), layer, rows, 0};
  }

  // Copies the last moments, oldest first; how many.
  size_t copy(Moment* out, size_t size) const {
    const size_t kept = count_ < kMoments ? count_ : kMoments;
    const size_t copied = kept < size ? kept : size;
    for (size_t i = 0; i < copied; ++i) out[i] = moments_[(count_ - copied + i) % kMoments];
    return copied;
  }

 private:
  Moment moments_[kMoments] = {};
  size_t count_ = 0;
};

}  // namespace ds41jax

#endif  // DS41JAX_TIMELINE_H_
