#include "hub.h"

#include <dlfcn.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace ds41jax {
namespace {

constexpr unsigned kMessage = 7;  // the one active-message id in use
constexpr int kProgressTurns = 64;  // a connection that fails again and again is always progress
constexpr auto kLongestPause = std::chrono::milliseconds(50);

const Ucx* loaded = nullptr;  // for callbacks, which UCX gives nothing else

// A request is freed by its callback alone: freed before, it would complete without calling.
void on_sent(void* request, ucs_status_t status, void* user) {
  auto* transfer = static_cast<Transfer*>(user);
  transfer->status = status;
  transfer->busy = false;
  loaded->ucp_request_free(request);
}

void on_received(void* request, ucs_status_t status, size_t size, void* user) {
  auto* transfer = static_cast<Transfer*>(user);
  transfer->status = status;
  transfer->size = size;
  transfer->busy = false;
  loaded->ucp_request_free(request);
}

void on_failure(void* user, ucp_ep_h, ucs_status_t status) {
  auto* endpoint = static_cast<Endpoint*>(user);
  endpoint->failed = true;
  endpoint->status = status;
}

[[noreturn]] void fail(const Ucx& ucx, const char* what, ucs_status_t status) {
  throw std::runtime_error(std::string(what) + ": " + ucx.ucs_status_string(status));
}

// Whether a list of transports names none that leaves the host.
bool only_shared_memory(const char* transports) {
  std::stringstream list(transports ? transports : "");
  bool any = false;
  for (std::string name; std::getline(list, name, ',');) {
    if (name == "self") continue;
    if (name != "sm" && name != "shm" && name != "posix" && name != "sysv") return false;
    any = true;
  }
  return any;
}

Ucx open_ucx(const char* path) {
  // UCX's own signal handlers and memory hooks would fight Python's and the accelerator runtime's.
  setenv("UCX_HANDLE_ERRORS", "none", 0);
  setenv("UCX_MEM_EVENTS", "n", 0);
  setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 0);
  setenv("UCX_LOG_LEVEL", "fatal", 0);  // peers that die are reported by the session
  Ucx ucx = {};
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    ucx.error = dlerror();
    return ucx;
  }
#define DS41JAX_FIND(name)                                                        \
  ucx.name = reinterpret_cast<decltype(ucx.name)>(dlsym(library, #name));         \
  if (!ucx.name) ucx.error = std::string(path) + " lacks " #name;
  DS41JAX_UCX_FUNCTIONS(DS41JAX_FIND)
#undef DS41JAX_FIND
  return ucx;
}

}  // namespace

const Ucx& load_ucx(const char* path) {
  static const Ucx ucx = open_ucx(path);
  loaded = &ucx;
  return ucx;
}

Hub::Hub(const Ucx& ucx, const char* transports, bool spin, Accept accept, void* owner)
    : ucx_(ucx),
      spin_(spin),
      shared_memory_(only_shared_memory(transports)),
      accept_(accept),
      owner_(owner) {
  ucp_config_t* config;
  ucs_status_t status = ucx.ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) fail(ucx, "reading UCX's settings", status);
  if (transports) status = ucx.ucp_config_modify(config, "TLS", transports);
  // A send that the peer has to fetch would never end if that peer died.
  if (status == UCS_OK && shared_memory_)
    status = ucx.ucp_config_modify(config, "RNDV_THRESH", "inf");
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | (spin ? 0 : UCP_FEATURE_WAKEUP);
  if (status == UCS_OK)
    status = ucx.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  ucx.ucp_config_release(config);
  if (status != UCS_OK) fail(ucx, "starting UCX", status);
  ucp_worker_params_t worker = {};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  status = ucx.ucp_worker_create(context_, &worker, &worker_);
  if (status != UCS_OK) fail(ucx, "creating a UCX worker", status);
  ucp_am_handler_param_t handler = {};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessage;
  handler.cb = on_message;
  handler.arg = this;
  status = ucx.ucp_worker_set_am_recv_handler(worker_, &handler);
  if (status == UCS_OK && !spin) status = ucx.ucp_worker_get_efd(worker_, &event_fd_);
  if (status != UCS_OK) fail(ucx, "setting a UCX worker up", status);
}

Hub::~Hub() {
  if (worker_) ucx_.ucp_worker_destroy(worker_);
  for (Buffer& buffer : buffers_) {
    ucx_.ucp_mem_unmap(context_, buffer.memory);
    free(buffer.data);
  }
  if (context_) ucx_.ucp_cleanup(context_);
}

std::vector<uint8_t> Hub::address() {
  ucp_address_t* address;
  size_t size;
  ucs_status_t status = ucx_.ucp_worker_get_address(worker_, &address, &size);
  if (status != UCS_OK) fail(ucx_, "reading a UCX address", status);
  auto* bytes = reinterpret_cast<uint8_t*>(address);
  std::vector<uint8_t> copy(bytes, bytes + size);
  ucx_.ucp_worker_release_address(worker_, address);
  return copy;
}

Buffer Hub::allocate(size_t size) {
  Buffer buffer;
  buffer.size = (size + 4095) / 4096 * 4096;
  buffer.data = static_cast<uint8_t*>(aligned_alloc(4096, buffer.size));
  if (!buffer.data) throw std::runtime_error("no memory for a frame buffer");
  memset(buffer.data, 0, buffer.size);
  ucp_mem_map_params_t params = {};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = buffer.data;
  params.length = buffer.size;
  ucs_status_t status = ucx_.ucp_mem_map(context_, &params, &buffer.memory);
  if (status != UCS_OK) {
    free(buffer.data);
    fail(ucx_, "registering memory", status);
  }
  buffers_.push_back(buffer);
  return buffer;
}

void Hub::connect(const uint8_t* address, size_t size, Endpoint& endpoint) {
  // UCX reads an address without knowing its size: zeros behind it end any list inside.
  std::vector<uint8_t> padded(address, address + size);
  padded.resize(size + 4096);
  endpoint.failed = false;
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(padded.data());
  params.err_mode = shared_memory_ ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_failure;
  params.err_handler.arg = &endpoint;
  ucs_status_t status = ucx_.ucp_ep_create(worker_, &params, &endpoint.handle);
  if (status != UCS_OK) {
    endpoint.handle = nullptr;
    fail(ucx_, "connecting", status);
  }
}

void Hub::close(Endpoint& endpoint) {
  if (!endpoint.handle) return;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = shared_memory_ ? 0 : UCP_EP_CLOSE_FLAG_FORCE;  // only the latter needs detection
  ucs_status_ptr_t request = ucx_.ucp_ep_close_nbx(endpoint.handle, &param);
  if (UCS_PTR_IS_PTR(request)) ucx_.ucp_request_free(request);
  endpoint.handle = nullptr;
}

void Hub::send(Endpoint& endpoint, Transfer& transfer, const Buffer& buffer, size_t size) {
  transfer.busy = true;
  transfer.status = UCS_OK;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = on_sent;
  param.user_data = &transfer;
  param.memh = buffer.memory;
  ucs_status_ptr_t request =
      ucx_.ucp_am_send_nbx(endpoint.handle, kMessage, transfer.header, sizeof transfer.header,
                           buffer.data, size, &param);
  if (UCS_PTR_IS_PTR(request)) return;
  transfer.busy = false;
  transfer.status = UCS_PTR_STATUS(request);
}

void Hub::let_go(std::unique_ptr<Transfer>& transfer) {
  if (!shared_memory_ || !transfer->busy) return;
  transfer.release();
  transfer = std::make_unique<Transfer>();
}

void Hub::progress() {
  for (int turns = 0; turns < kProgressTurns && ucx_.ucp_worker_progress(worker_); ++turns) {
  }
}

void Hub::pause(Lock& lock, Clock::time_point until) {
  if (spin_ || ucx_.ucp_worker_arm(worker_) != UCS_OK) {
    lock.unlock();
    lock.lock();
    return;
  }
  lock.unlock();
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
  left = std::min<std::chrono::milliseconds>(left, kLongestPause);
  pollfd descriptor = {event_fd_, POLLIN, 0};
  poll(&descriptor, 1, std::max<int>(1, left.count()));
  lock.lock();
}

ucs_status_t Hub::on_message(void* self, const void* header, size_t header_size, void* data,
                             size_t size, const ucp_am_recv_param_t* param) {
  if (header_size != sizeof(Transfer::header)) return UCS_OK;  // no message of ours: dropped
  uint64_t words[2];
  memcpy(words, header, sizeof words);
  bool rendezvous = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
  return static_cast<Hub*>(self)->arrive(words, data, size, rendezvous);
}

ucs_status_t Hub::arrive(const uint64_t* header, void* data, size_t size, bool rendezvous) {
  Target target = accept_(owner_, header[0], header[1], size);
  if (!target.transfer) return UCS_OK;
  Transfer& transfer = *target.transfer;
  if (!rendezvous) {
    memcpy(target.buffer->data, data, size);
    transfer.size = size;
    transfer.status = UCS_OK;
    return UCS_OK;
  }
  transfer.busy = true;
  transfer.size = size;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_MEMH;
  param.cb.recv_am = on_received;
  param.user_data = &transfer;
  param.memh = target.buffer->memory;
  ucs_status_ptr_t request =
      ucx_.ucp_am_recv_data_nbx(worker_, data, target.buffer->data, size, &param);
  if (UCS_PTR_IS_PTR(request)) return UCS_OK;
  transfer.busy = false;
  transfer.status = UCS_PTR_STATUS(request);
  return UCS_OK;
}

}  // namespace ds41jax
