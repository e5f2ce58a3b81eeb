// XLA's calls on the CPU, and the C functions that Python reaches through ctypes.

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "sessions.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using ds41jax::Coordinator;
using ds41jax::copy_text;
using ds41jax::ExpertWorker;

namespace ds41jax {

Sessions<Coordinator>& coordinators() {
  static Sessions<Coordinator> open;
  return open;
}

Sessions<ExpertWorker>& expert_workers() {
  static Sessions<ExpertWorker> open;
  return open;
}

}  // namespace ds41jax

using ds41jax::coordinators;
using ds41jax::expert_workers;

namespace {


ffi::Error closed() { return ffi::Error(ffi::ErrorCode::kUnavailable, "the fabric is closed"); }

ffi::Error expert_send(int32_t session, int32_t source, ffi::Buffer<ffi::U8> codes,
                       ffi::Buffer<ffi::U8> scales, ffi::Buffer<ffi::S32> ids,
                       ffi::Buffer<ffi::F32> weights, ffi::Buffer<ffi::S32> layer_rows_fault,
                       ffi::ResultBuffer<ffi::U32> ticket) {
  auto coordinator = coordinators().get(session);
  if (!coordinator) return closed();
  const int32_t* numbers = layer_rows_fault.typed_data();
  uint64_t given = uint32_t(numbers[2]);
  if (!given)
    given = coordinator->send({uint32_t(numbers[0]), uint32_t(numbers[1]), uint16_t(source),
                               codes.typed_data(), scales.typed_data(), ids.typed_data(),
                               weights.typed_data(), nullptr});
  ticket->typed_data()[0] = given >> 32;
  ticket->typed_data()[1] = given;
  return ffi::Error::Success();
}

// The operands after `rows` only order the call after what the step does meanwhile.
ffi::Error expert_wait(int32_t session, ffi::Buffer<ffi::U32> ticket, ffi::Buffer<ffi::S32> rows,
                       ffi::RemainingArgs, ffi::ResultBuffer<ffi::F32> sums,
                       ffi::ResultBuffer<ffi::S32> fault) {
  auto coordinator = coordinators().get(session);
  if (!coordinator) return closed();
  const uint32_t* words = ticket.typed_data();
  const uint32_t live = *rows.typed_data();
  const auto shape = sums->dimensions();
  float* out = sums->typed_data();
  const uint32_t bad = coordinator->wait(uint64_t{words[0]} << 32 | words[1], live, out);
  const size_t done = bad ? 0 : live;
  std::memset(out + done * shape[1], 0, (shape[0] - done) * shape[1] * sizeof(float));
  *fault->typed_data() = bad;
  return ffi::Error::Success();
}

ffi::Error expert_receive(int32_t session, int32_t above, int32_t timeout_ms,
                          ffi::Buffer<ffi::S32>, ffi::ResultBuffer<ffi::U8> codes,
                          ffi::ResultBuffer<ffi::U8> scales, ffi::ResultBuffer<ffi::S32> ids,
                          ffi::ResultBuffer<ffi::F32> weights,
                          ffi::ResultBuffer<ffi::S32> place_layer) {
  auto worker = expert_workers().get(session);
  if (!worker) return closed();
  auto work = worker->receive(above, codes->dimensions()[0], timeout_ms, codes->typed_data(),
                              scales->typed_data(), ids->typed_data(), weights->typed_data());
  place_layer->typed_data()[0] = work.place;
  place_layer->typed_data()[1] = work.layer;
  return ffi::Error::Success();
}

ffi::Error expert_respond(int32_t session, ffi::Buffer<ffi::BF16> rows,
                          ffi::Buffer<ffi::S32> place_layer, ffi::ResultBuffer<ffi::S32> done) {
  auto worker = expert_workers().get(session);
  if (!worker) return closed();
  worker->respond(place_layer.typed_data()[0],
                  reinterpret_cast<const uint8_t*>(rows.typed_data()));
  *done->typed_data() = place_layer.typed_data()[0];
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxExpertSend, expert_send,
                              ffi::Ffi::Bind()
                                  .Attr<int32_t>("session")
                                  .Attr<int32_t>("source")
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::U32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxExpertWait, expert_wait,
                              ffi::Ffi::Bind()
                                  .Attr<int32_t>("session")
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxExpertReceive, expert_receive,
                              ffi::Ffi::Bind()
                                  .Attr<int32_t>("session")
                                  .Attr<int32_t>("above")
                                  .Attr<int32_t>("timeout_ms")
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxExpertRespond, expert_respond,
                              ffi::Ffi::Bind()
                                  .Attr<int32_t>("session")
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

extern "C" {

// Every function that can fail returns a negative number and says why in `error`.

int ds41jax_open_coordinator(const char* ucx, const char* transports, int spin,
                             const ds41jax::CoordinatorOptions* options, char* error,
                             size_t error_size) {
  try {
    const auto& api = ds41jax::load_ucx(ucx);
    if (!api.error.empty()) throw std::runtime_error(api.error);
    int place = coordinators().add(std::make_shared<Coordinator>(api, transports, spin, *options));
    if (place < 0) throw std::runtime_error("too many fabrics are open in this process");
    return place;
  } catch (const std::exception& fault) {
    copy_text(fault.what(), error, error_size);
    return -1;
  }
}

int ds41jax_open_worker(const char* ucx, const char* transports, int spin,
                        const ds41jax::WorkerOptions* options, char* error, size_t error_size) {
  try {
    const auto& api = ds41jax::load_ucx(ucx);
    if (!api.error.empty()) throw std::runtime_error(api.error);
    int place = expert_workers().add(std::make_shared<ExpertWorker>(api, transports, spin, *options));
    if (place < 0) throw std::runtime_error("too many workers are open in this process");
    return place;
  } catch (const std::exception& fault) {
    copy_text(fault.what(), error, error_size);
    return -1;
  }
}

void ds41jax_close_coordinator(int session) { coordinators().remove(session); }
void ds41jax_close_worker(int session) { expert_workers().remove(session); }

// The transport's address, for the handshake; its size, or -1 if `out` is too small.
int ds41jax_address(int session, int is_worker, uint8_t* out, size_t size) {
  auto worker = is_worker ? expert_workers().get(session) : nullptr;
  auto coordinator = is_worker ? nullptr : coordinators().get(session);
  if (!worker && !coordinator) return -1;
  auto address = worker ? worker->address() : coordinator->address();
  if (address.size() > size) return -1;
  std::memcpy(out, address.data(), address.size());
  return address.size();
}

int ds41jax_attach(int session, uint32_t rank, const uint8_t* address, size_t size,
                   uint64_t token, char* error, size_t error_size) {
  auto coordinator = coordinators().get(session);
  std::string why =
      coordinator ? coordinator->attach(rank, address, size, token) : "the fabric is closed";
  copy_text(why, error, error_size);
  return why.empty() ? 0 : -1;
}

void ds41jax_detach(int session, uint32_t rank, const char* why) {
  if (auto coordinator = coordinators().get(session)) coordinator->detach(rank, why);
}

int ds41jax_up(int session, uint32_t rank) {
  auto coordinator = coordinators().get(session);
  return coordinator && coordinator->up(rank);
}

void ds41jax_fault(int session, uint32_t number, char* out, size_t size) {
  auto coordinator = coordinators().get(session);
  copy_text(coordinator ? coordinator->fault(number) : "the fabric is closed", out, size);
}

void ds41jax_down_reason(int session, uint32_t rank, char* out, size_t size) {
  auto coordinator = coordinators().get(session);
  copy_text(coordinator ? coordinator->down_reason(rank) : "the fabric is closed", out, size);
}

uint64_t ds41jax_takeovers(int session) {
  auto coordinator = coordinators().get(session);
  return coordinator ? coordinator->takeovers() : 0;
}

int ds41jax_admit(int session, const uint8_t* address, size_t size, uint64_t token, char* error,
                  size_t error_size) {
  auto worker = expert_workers().get(session);
  if (!worker) return -1;
  try {
    int peer = worker->admit(address, size, token);
    if (peer < 0) copy_text("every place for a coordinator is taken", error, error_size);
    return peer;
  } catch (const std::exception& fault) {
    copy_text(fault.what(), error, error_size);
    return -1;
  }
}

void ds41jax_dismiss(int session, int peer) {
  if (auto worker = expert_workers().get(session)) worker->dismiss(peer);
}

uint32_t ds41jax_next_rows(int session, uint32_t timeout_ms) {
  auto worker = expert_workers().get(session);
  return worker ? worker->next_rows(timeout_ms) : 0;
}

void ds41jax_worker_counts(int session, uint64_t* answered, uint64_t* refused, char* refusal,
                           size_t size) {
  auto worker = expert_workers().get(session);
  if (!worker) return;
  *answered = worker->answered();
  *refused = worker->refused();
  copy_text(worker->last_refusal(), refusal, size);
}

// The last moments of a session, oldest first; how many.
size_t ds41jax_timeline(int session, int is_worker, ds41jax::Moment* out, size_t size) {
  if (is_worker) {
    auto worker = expert_workers().get(session);
    return worker ? worker->timeline(out, size) : 0;
  }
  auto coordinator = coordinators().get(session);
  return coordinator ? coordinator->timeline(out, size) : 0;
}

// The codec, for tests and tools.

size_t ds41jax_encode_request(const ds41jax::Geometry* geometry, uint64_t request, uint32_t flags,
                              const ds41jax::Rows* rows, uint8_t* out) {
  ds41jax::encode_request(*geometry, request, flags, *rows, out);
  return geometry->request_bytes(rows->rows);
}

const char* ds41jax_check_request(const ds41jax::Geometry* geometry, const uint8_t* data,
                                  size_t size) {
  return ds41jax::check_request(*geometry, data, size);
}

void ds41jax_encode_response(const ds41jax::Geometry* geometry, const uint8_t* request,
                             uint16_t status, uint64_t executor, uint8_t* out) {
  ds41jax::RequestHeader header;
  std::memcpy(&header, request, sizeof header);
  ds41jax::encode_response(*geometry, header, status, executor, out);
}

const char* ds41jax_check_response(const ds41jax::Geometry* geometry, uint64_t request,
                                   uint32_t layer, uint32_t rows, uint64_t executor,
                                   const uint8_t* data, size_t size) {
  return ds41jax::check_response(*geometry, request, layer, rows, executor, data, size);
}

void ds41jax_plan_owners(const ds41jax::Geometry* geometry, uint32_t layer, const int32_t* ids,
                         uint32_t rows, int balanced, uint32_t alive, uint8_t* owners) {
  ds41jax::plan_owners(*geometry, layer, ids, rows, balanced, alive, owners);
}

}  // extern "C"
