#include "cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace ds41jax {
namespace {

constexpr uint32_t kBoxes = 2;  // exchanges in flight: one a lane
constexpr uint32_t kHeaderBytes = 256;
constexpr uint32_t kThreads = 256;
constexpr unsigned kPortableMapped = 1 | 2;  // CU_MEMHOSTALLOC_PORTABLE | _DEVICEMAP
constexpr int kIdleSpins = 20000;

// The driver's functions that are used, by their exported names.
struct Driver {
  int (*init)(unsigned);
  int (*device_get)(int*, int);
  int (*retain)(void**, int);
  int (*push)(void*);
  int (*pop)(void**);
  int (*load)(void**, const void*);
  int (*function)(void**, void*, const char*);
  int (*allocate)(void**, size_t, unsigned);
  int (*device_pointer)(uint64_t*, void*, unsigned);
  int (*free_host)(void*);
  int (*to_device)(uint64_t, const void*, size_t, void*);
  int (*to_host)(void*, uint64_t, size_t, void*);
  int (*clear)(uint64_t, unsigned char, size_t, void*);
  int (*synchronize)(void*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**);
  std::string error;
};

Driver open_driver() {
  Driver driver = {};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    driver.error = dlerror();
    return driver;
  }
  auto find = [&](auto& pointer, const char* name) {
    pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(dlsym(library, name));
    if (!pointer) driver.error = std::string("the CUDA driver lacks ") + name;
  };
  find(driver.init, "cuInit");
  find(driver.device_get, "cuDeviceGet");
  find(driver.retain, "cuDevicePrimaryCtxRetain");
  find(driver.push, "cuCtxPushCurrent_v2");
  find(driver.pop, "cuCtxPopCurrent_v2");
  find(driver.load, "cuModuleLoadData");
  find(driver.function, "cuModuleGetFunction");
  find(driver.allocate, "cuMemHostAlloc");
  find(driver.device_pointer, "cuMemHostGetDevicePointer_v2");
  find(driver.free_host, "cuMemFreeHost");
  find(driver.to_device, "cuMemcpyHtoDAsync_v2");
  find(driver.to_host, "cuMemcpyDtoHAsync_v2");
  find(driver.clear, "cuMemsetD8Async");
  find(driver.synchronize, "cuStreamSynchronize");
  find(driver.launch, "cuLaunchKernel");
  return driver;
}

const Driver& driver() {
  static const Driver opened = open_driver();
  return opened;
}

void check(int status, const char* what) {
  if (status) throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(status));
}

// The GPU's context, current while this lives.
class Current {
 public:
  Current() {
    const Driver& cuda = driver();
    if (!cuda.error.empty()) throw std::runtime_error(cuda.error);
    int device;
    void* context;
    check(cuda.init(0), "starting CUDA");
    check(cuda.device_get(&device, 0), "finding the GPU");
    check(cuda.retain(&context, device), "opening the GPU");
    check(cuda.push(context), "opening the GPU");
  }
  ~Current() {
    void* previous;
    driver().pop(&previous);
  }
};

uint64_t aligned(uint64_t size) { return (size + 15) / 16 * 16; }

volatile uint32_t* header_of(uint8_t* box) { return reinterpret_cast<volatile uint32_t*>(box); }

}  // namespace

const char* clear(CuStream stream, void* data, uint64_t bytes) {
  const int status = driver().clear(reinterpret_cast<uint64_t>(data), 0, bytes, stream);
  return status ? "clearing an idle card's results failed" : nullptr;
}

Mailboxes::Mailboxes(std::shared_ptr<Coordinator> coordinator, const CoordinatorOptions& options,
                     const void* image)
    : coordinator_(std::move(coordinator)) {
  const Current current;
  const Driver& cuda = driver();
  const Geometry& g = options.geometry;
  layout_.boxes = kBoxes;
  layout_.capacity = g.capacity;
  layout_.hidden = g.hidden;
  layout_.choices = g.choices;
  // The host gives up first, so that its reason is the one that is told.
  layout_.patience = (uint64_t{options.deadline_ms} * 2 + 5000) * 1000000;
  layout_.codes = kHeaderBytes;
  layout_.scales = layout_.codes + aligned(uint64_t{g.capacity} * g.hidden);
  layout_.ids = layout_.scales + aligned(uint64_t{g.capacity} * (g.hidden / kScaleGroup));
  layout_.weights = layout_.ids + aligned(uint64_t{g.capacity} * g.choices * 4);
  layout_.sums = layout_.weights + aligned(uint64_t{g.capacity} * g.choices * 4);
  layout_.size = layout_.sums + aligned(uint64_t{g.capacity} * g.hidden * 4);
  void *module, *memory;
  check(cuda.load(&module, image), "loading the exchange's kernels");
  check(cuda.function(&send_, module, "ds41jax_send"), "finding a kernel");
  check(cuda.function(&await_, module, "ds41jax_await"), "finding a kernel");
  check(cuda.function(&take_, module, "ds41jax_take"), "finding a kernel");
  check(cuda.allocate(&memory, layout_.size * kBoxes, kPortableMapped), "pinning mailboxes");
  host_ = static_cast<uint8_t*>(memory);
  std::memset(host_, 0, layout_.size * kBoxes);
  check(cuda.device_pointer(&device_, host_, 0), "mapping mailboxes");
  for (uint32_t box = 0; box < kBoxes; ++box) threads_.emplace_back([this, box] { serve(box); });
}

Mailboxes::~Mailboxes() {
  stopped_ = true;
  for (std::thread& thread : threads_) thread.join();
  if (host_) driver().free_host(host_);
}

// Answers one mailbox: its numbers come in steps of kBoxes, and never two at once.
void Mailboxes::serve(uint32_t box) {
  uint8_t* base = host_ + layout_.size * box;
  volatile uint32_t* header = header_of(base);
  uint32_t last = 0;
  int idle = 0;
  while (!stopped_) {
    const uint32_t number = header[0];
    if (number == last) {
      if (++idle > kIdleSpins) std::this_thread::sleep_for(std::chrono::microseconds(50));
      continue;
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    idle = 0;
    last = number;
    const Rows rows = {header[3],
                       header[4],
                       uint16_t(header[5]),
                       base + layout_.codes,
                       base + layout_.scales,
                       reinterpret_cast<const int32_t*>(base + layout_.ids),
                       reinterpret_cast<const float*>(base + layout_.weights),
                       nullptr};
    const uint64_t ticket = coordinator_->send(rows);
    header[2] = coordinator_->wait(ticket, rows.rows,
                                   reinterpret_cast<float*>(base + layout_.sums));
    std::atomic_thread_fence(std::memory_order_seq_cst);
    header[1] = number;
  }
}

const char* Mailboxes::launch(CuStream stream, CuFunction kernel, uint32_t blocks,
                              uint32_t threads, void** arguments) {
  const int status =
      driver().launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr);
  return status ? "a kernel of the exchange did not start" : nullptr;
}

const char* Mailboxes::send(CuStream stream, int source, const void* codes, const void* scales,
                            const void* ids, const void* weights, const void* numbers,
                            void* ticket) {
  void* arguments[] = {&device_, &layout_, &codes,   &scales, &ids,
                       &weights, &numbers, &source, &ticket};
  const uint32_t blocks = 1 + layout_.capacity * layout_.hidden / (16 * kThreads * 4);
  return launch(stream, send_, std::min(blocks, 32u), kThreads, arguments);
}

const char* Mailboxes::wait(CuStream stream, const void* ticket, const void* rows, void* sums,
                            uint64_t bytes, void* fault) {
  void* waiting[] = {&device_, &layout_, &ticket, &fault};
  if (const char* why = launch(stream, await_, 1, 1, waiting)) return why;
  void* taking[] = {&device_, &layout_, &ticket, &rows, &fault, &sums, &bytes};
  const uint32_t blocks = 1 + uint32_t(bytes / (16 * kThreads * 4));
  return launch(stream, take_, std::min(blocks, 64u), kThreads, taking);
}

Staging::Staging(const Geometry& geometry) : geometry_(geometry) {
  const Current current;
  const Geometry& g = geometry_;
  auto pinned = [&](size_t size) {
    void* memory;
    check(driver().allocate(&memory, size, kPortableMapped), "pinning a frame's buffers");
    memory_.push_back(memory);
    return memory;
  };
  const size_t rows = g.capacity;
  codes_ = static_cast<uint8_t*>(pinned(rows * g.hidden));
  scales_ = static_cast<uint8_t*>(pinned(rows * (g.hidden / kScaleGroup)));
  rows_ = static_cast<uint8_t*>(pinned(rows * g.hidden * 2));
  ids_ = static_cast<int32_t*>(pinned(rows * g.choices * 4));
  weights_ = static_cast<float*>(pinned(rows * g.choices * 4));
  place_ = static_cast<int32_t*>(pinned(8));
}

Staging::~Staging() {
  for (void* memory : memory_) driver().free_host(memory);
}

const char* Staging::receive(CuStream stream, ExpertWorker& worker, uint32_t above,
                             uint32_t capacity, uint32_t timeout_ms, void* codes, void* scales,
                             void* ids, void* weights, void* place_layer) {
  const Driver& cuda = driver();
  // What the copies before these read must be on the card before it is overwritten.
  if (cuda.synchronize(stream)) return "the GPU failed before a frame was received";
  const Work work =
      worker.receive(above, capacity, timeout_ms, codes_, scales_, ids_, weights_);
  place_[0] = work.place;
  place_[1] = work.layer;
  const Geometry& g = geometry_;
  auto copy = [&](void* to, const void* from, size_t size) {
    return cuda.to_device(reinterpret_cast<uint64_t>(to), from, size, stream);
  };
  const size_t rows = capacity;
  int status = copy(codes, codes_, rows * g.hidden);
  status |= copy(scales, scales_, rows * (g.hidden / kScaleGroup));
  status |= copy(ids, ids_, rows * g.choices * 4);
  status |= copy(weights, weights_, rows * g.choices * 4);
  status |= copy(place_layer, place_, 8);
  return status ? "a frame did not reach the GPU" : nullptr;
}

const char* Staging::respond(CuStream stream, ExpertWorker& worker, const void* rows,
                             uint64_t bytes, const void* place_layer, void* done) {
  const Driver& cuda = driver();
  int status = cuda.to_host(rows_, reinterpret_cast<uint64_t>(rows), bytes, stream);
  status |= cuda.to_host(place_, reinterpret_cast<uint64_t>(place_layer), 8, stream);
  status |= cuda.synchronize(stream);
  if (status) return "an answer did not leave the GPU";
  worker.respond(place_[0], rows_);
  status = cuda.to_device(reinterpret_cast<uint64_t>(done), place_, 4, stream);
  return status ? "an answer's end did not reach the GPU" : nullptr;
}

}  // namespace ds41jax
