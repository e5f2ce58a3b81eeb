// XLA's calls on a GPU. Those of a coordinator only launch kernels, so that a step stays one
// captured graph; those of a worker wait on the host, which has nothing else to do.

#include <algorithm>
#include <cstring>
#include <memory>

#include "cuda.h"
#include "sessions.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using ds41jax::CuStream;
using ds41jax::Mailboxes;
using ds41jax::Staging;

namespace {

ds41jax::Sessions<Mailboxes> mailboxes;
ds41jax::Sessions<Staging> stagings;

ffi::Error result(const char* why) {
  return why ? ffi::Error(ffi::ErrorCode::kInternal, why) : ffi::Error::Success();
}

// Only the first card speaks with workers; the others send no rows, so nothing is what they get.
bool speaks(int32_t ordinal) { return ordinal == 0; }

ffi::Error send_rows(CuStream stream, int32_t ordinal, int32_t session, int32_t source,
                     ffi::Buffer<ffi::U8> codes, ffi::Buffer<ffi::U8> scales,
                     ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::F32> weights,
                     ffi::Buffer<ffi::S32> numbers, ffi::ResultBuffer<ffi::U32> ticket) {
  auto boxes = mailboxes.get(session);
  if (!boxes) return result("the fabric is closed");
  if (!speaks(ordinal))
    return result(ds41jax::clear(stream, ticket->untyped_data(), ticket->size_bytes()));
  return result(boxes->send(stream, source, codes.untyped_data(), scales.untyped_data(),
                            ids.untyped_data(), weights.untyped_data(), numbers.untyped_data(),
                            ticket->untyped_data()));
}

ffi::Error wait_sums(CuStream stream, int32_t ordinal, int32_t session, ffi::Buffer<ffi::U32> ticket,
                     ffi::Buffer<ffi::S32> rows, ffi::RemainingArgs,
                     ffi::ResultBuffer<ffi::F32> sums, ffi::ResultBuffer<ffi::S32> fault) {
  auto boxes = mailboxes.get(session);
  if (!boxes) return result("the fabric is closed");
  if (!speaks(ordinal)) {
    const char* why = ds41jax::clear(stream, fault->untyped_data(), fault->size_bytes());
    return result(why ? why : ds41jax::clear(stream, sums->untyped_data(), sums->size_bytes()));
  }
  return result(boxes->wait(stream, ticket.untyped_data(), rows.untyped_data(),
                            sums->untyped_data(), sums->size_bytes(), fault->untyped_data()));
}

ffi::Error receive_frame(CuStream stream, int32_t session, int32_t above, int32_t timeout_ms,
                         ffi::Buffer<ffi::S32>, ffi::ResultBuffer<ffi::U8> codes,
                         ffi::ResultBuffer<ffi::U8> scales, ffi::ResultBuffer<ffi::S32> ids,
                         ffi::ResultBuffer<ffi::F32> weights,
                         ffi::ResultBuffer<ffi::S32> place_layer) {
  auto worker = ds41jax::expert_workers().get(session);
  auto staging = stagings.get(session);
  if (!worker || !staging) return result("the worker is closed");
  return result(staging->receive(stream, *worker, above, codes->dimensions()[0], timeout_ms,
                                 codes->untyped_data(), scales->untyped_data(),
                                 ids->untyped_data(), weights->untyped_data(),
                                 place_layer->untyped_data()));
}

ffi::Error send_answer(CuStream stream, int32_t session, ffi::Buffer<ffi::BF16> rows,
                       ffi::Buffer<ffi::S32> place_layer, ffi::ResultBuffer<ffi::S32> done) {
  auto worker = ds41jax::expert_workers().get(session);
  auto staging = stagings.get(session);
  if (!worker || !staging) return result("the worker is closed");
  return result(staging->respond(stream, *worker, rows.untyped_data(), rows.size_bytes(),
                                 place_layer.untyped_data(), done->untyped_data()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxCudaReceive, receive_frame,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CuStream>>()
                                  .Attr<int32_t>("session")
                                  .Attr<int32_t>("above")
                                  .Attr<int32_t>("timeout_ms")
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxCudaRespond, send_answer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CuStream>>()
                                  .Attr<int32_t>("session")
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxCudaSend, send_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CuStream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<int32_t>("session")
                                  .Attr<int32_t>("source")
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::U32>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(Ds41jaxCudaWait, wait_sums,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CuStream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Attr<int32_t>("session")
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>(),
                              {ffi::Traits::kCmdBufferCompatible});

extern "C" {

// Gives a coordinator its GPU side, at the same place; 0, or -1 and why.
int ds41jax_open_mailboxes(int session, const ds41jax::CoordinatorOptions* options,
                           const void* image, char* error, size_t error_size) {
  try {
    auto coordinator = ds41jax::coordinators().get(session);
    if (!coordinator) throw std::runtime_error("the fabric is closed");
    mailboxes.put(session, std::make_shared<Mailboxes>(coordinator, *options, image));
    return 0;
  } catch (const std::exception& fault) {
    ds41jax::copy_text(fault.what(), error, error_size);
    return -1;
  }
}

// Gives a worker its GPU side, at the same place; 0, or -1 and why.
int ds41jax_open_staging(int session, const ds41jax::Geometry* geometry, char* error,
                         size_t error_size) {
  try {
    stagings.put(session, std::make_shared<Staging>(*geometry));
    return 0;
  } catch (const std::exception& fault) {
    ds41jax::copy_text(fault.what(), error, error_size);
    return -1;
  }
}

void ds41jax_close_staging(int session) { stagings.remove(session); }

void ds41jax_close_mailboxes(int session) { mailboxes.remove(session); }

}  // extern "C"
