// The bare transport: two processes bounce active messages of given sizes, nothing else.
//
//   pingpong LIBUCP TRANSPORTS SPIN OUT_BYTES BACK_BYTES ROUNDS
//
// The parent forks the child; they exchange addresses over a socket pair. Prints one round-trip
// time a line, in microseconds.

#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "hub.h"

using namespace ds41jax;

namespace {

constexpr int kWarmUp = 200;

struct Side {
  Transfer sent, received;
  Buffer in, out;
  Endpoint endpoint;
  bool arrived = false;
};

Target accept(void* owner, uint64_t, uint64_t, size_t) {
  auto* side = static_cast<Side*>(owner);
  side->arrived = true;
  return {&side->received, &side->in};
}

void connect(Hub& hub, Side& side, int channel) {
  auto mine = hub.address();
  uint32_t size = mine.size();
  if (write(channel, &size, 4) != 4 || write(channel, mine.data(), size) != ssize_t(size)) abort();
  if (read(channel, &size, 4) != 4) abort();
  std::vector<uint8_t> other(size);
  for (size_t got = 0; got < size;) {
    ssize_t n = read(channel, other.data() + got, size - got);
    if (n <= 0) abort();
    got += n;
  }
  hub.connect(other.data(), size, side.endpoint);
}

void wait_message(Hub& hub, Side& side, Lock& lock) {
  while (true) {
    hub.progress();
    if (side.arrived && !side.received.busy && !side.sent.busy) break;
    hub.pause(lock, Clock::now() + std::chrono::seconds(5));
  }
  side.arrived = false;
}

void pin(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core % sysconf(_SC_NPROCESSORS_ONLN), &cores);
  sched_setaffinity(0, sizeof cores, &cores);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const char* transports = argv[2][0] ? argv[2] : nullptr;
  const bool spin = atoi(argv[3]);
  const size_t out = atol(argv[4]), back = atol(argv[5]);
  const int rounds = atoi(argv[6]) + kWarmUp;
  int channel[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, channel)) return 1;
  const bool child = fork() == 0;
  pin(child);
  const Ucx& ucx = load_ucx(argv[1]);
  Side side;
  Hub hub(ucx, transports, spin, accept, &side);
  Lock lock(hub.mutex);
  side.in = hub.allocate(std::max(out, back));
  side.out = hub.allocate(std::max(out, back));
  connect(hub, side, channel[child]);
  for (int i = 0; i < rounds; ++i) {
    auto start = Clock::now();
    if (!child) hub.send(side.endpoint, side.sent, side.out, out);
    wait_message(hub, side, lock);
    if (child) hub.send(side.endpoint, side.sent, side.out, back);
    if (!child && i >= kWarmUp)
      printf("%.3f\n", std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  while (side.sent.busy) hub.progress();
  if (!child) {
    char done = 1;
    if (write(channel[0], &done, 1) != 1) return 1;
    wait(nullptr);
  } else {
    char done;
    while (recv(channel[1], &done, 1, MSG_DONTWAIT) < 0) hub.progress();
  }
  hub.close(side.endpoint);
  return 0;
}
