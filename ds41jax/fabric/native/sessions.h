// What is open in this process. Compiled programs name a session by its place, so that they outlive
// it.

#ifndef DS41JAX_SESSIONS_H_
#define DS41JAX_SESSIONS_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "coordinator.h"
#include "expert_worker.h"

namespace ds41jax {

constexpr int kSessions = 32;

template <typename T>
class Sessions {
 public:
  // The first free place, or -1.
  int add(std::shared_ptr<T> session) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < kSessions; ++i)
      if (!places_[i]) {
        places_[i] = std::move(session);
        return i;
      }
    return -1;
  }
  void put(int place, std::shared_ptr<T> session) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (place >= 0 && place < kSessions) places_[place].swap(session);
  }
  std::shared_ptr<T> get(int place) {
    std::lock_guard<std::mutex> lock(mutex_);
    return place >= 0 && place < kSessions ? places_[place] : nullptr;
  }
  void remove(int place) { put(place, nullptr); }

 private:
  std::mutex mutex_;
  std::shared_ptr<T> places_[kSessions];
};

// Shared by the CPU's and the GPU's calls.
Sessions<Coordinator>& coordinators();
Sessions<ExpertWorker>& expert_workers();

inline void copy_text(const std::string& text, char* out, size_t size) {
  if (!size) return;
  const size_t count = std::min(size - 1, text.size());
  std::memcpy(out, text.data(), count);
  out[count] = 0;
}

}  // namespace ds41jax

#endif  // DS41JAX_SESSIONS_H_
