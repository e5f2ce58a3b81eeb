#include "expert_worker.h"

#include <algorithm>
#include <cstring>

namespace ds41jax {

ExpertWorker::ExpertWorker(const Ucx& ucx, const char* transports, bool spin,
                           const WorkerOptions& options)
    : options_(options), hub_(ucx, transports, spin, accept, this) {
  const Geometry& g = options_.geometry;
  for (Frame& frame : frames_) {
    frame.request = hub_.allocate(g.request_bytes(g.capacity));
    frame.response = hub_.allocate(g.response_bytes(g.capacity));
  }
}

ExpertWorker::~ExpertWorker() {
  Lock lock(hub_.mutex);
  for (Peer& peer : peers_) hub_.close(peer.endpoint);
  hub_.progress();
}

std::vector<uint8_t> ExpertWorker::address() {
  Lock lock(hub_.mutex);
  return hub_.address();
}

int ExpertWorker::admit(const uint8_t* address, size_t size, uint64_t token) {
  Lock lock(hub_.mutex);
  for (uint32_t p = 0; p < kPeers; ++p) {
    Peer& peer = peers_[p];
    if (peer.taken) continue;
    hub_.connect(address, size, peer.endpoint);
    peer.taken = true;
    peer.token = token;
    return p;
  }
  return -1;
}

void ExpertWorker::dismiss(int place) {
  Lock lock(hub_.mutex);
  Peer& peer = peers_[place];
  hub_.close(peer.endpoint);
  peer.taken = false;
  peer.token = 0;
  for (Frame& frame : frames_) {
    if (frame.peer != place) continue;
    frame.peer = -1;  // its answer has nowhere to go
    hub_.let_go(frame.sent);
  }
}

Target ExpertWorker::accept(void* self, uint64_t token, uint64_t request, size_t size) {
  auto* me = static_cast<ExpertWorker*>(self);
  for (uint32_t p = 0; p < kPeers; ++p) {
    if (!me->peers_[p].taken || me->peers_[p].token != token) continue;
    for (Frame& frame : me->frames_) {
      if (frame.state != State::kFree) continue;
      if (size > frame.request.size) break;
      frame.state = State::kArriving;
      frame.order = ++me->order_;
      frame.peer = p;
      frame.received.status = UCS_OK;
      frame.sent->header[0] = token;
      frame.sent->header[1] = request;
      return {&frame.received, &frame.request};
    }
    ++me->refused_;
    me->last_refusal_ = "a frame larger than agreed, or more frames than buffers";
    return {};
  }
  ++me->refused_;
  me->last_refusal_ = "a frame of nobody who was let in";
  return {};
}

// Checks what has arrived whole, and frees what has been sent or belongs to a peer that is gone.
void ExpertWorker::sweep() {
  hub_.progress();
  for (Frame& frame : frames_) {
    const bool gone = frame.peer < 0 || peers_[frame.peer].endpoint.failed;
    if (frame.state == State::kAnswering && !frame.sent->busy) frame.state = State::kFree;
    if (frame.state == State::kChecked && gone) frame.state = State::kFree;
    if (frame.state != State::kArriving || frame.received.busy) continue;
    if (gone || frame.received.status != UCS_OK) {
      frame.state = State::kFree;
      continue;
    }
    const char* why =
        check_request(options_.geometry, frame.request.data, frame.received.size);
    RequestHeader header;
    std::memcpy(&header, frame.request.data, sizeof header);
    if (!why && header.request != frame.sent->header[1]) why = "two request ids in one frame";
    if (!why) {
      frame.state = State::kChecked;
      continue;
    }
    ++refused_;
    last_refusal_ = why;
    answer(frame, kStatusRefused);
  }
}

ExpertWorker::Frame* ExpertWorker::oldest(Lock& lock,
                                          Clock::time_point until) {
  while (true) {
    sweep();
    Frame* found = nullptr;
    for (Frame& frame : frames_)
      if (frame.state == State::kChecked && (!found || frame.order < found->order))
        found = &frame;
    if (found || Clock::now() > until) return found;
    hub_.pause(lock, until);
  }
}

uint32_t ExpertWorker::next_rows(uint32_t timeout_ms) {
  Lock lock(hub_.mutex);
  Frame* frame = oldest(lock, Clock::now() + std::chrono::milliseconds(timeout_ms));
  if (!frame) return 0;
  RequestHeader header;
  std::memcpy(&header, frame->request.data, sizeof header);
  return header.rows;
}

Work ExpertWorker::receive(uint32_t above, uint32_t capacity, uint32_t timeout_ms, uint8_t* codes,
                           uint8_t* scales, int32_t* ids, float* weights) {
  Lock lock(hub_.mutex);
  Frame* frame = oldest(lock, Clock::now() + std::chrono::milliseconds(timeout_ms));
  RequestHeader header = {};
  if (frame) std::memcpy(&header, frame->request.data, sizeof header);
  if (!frame || header.rows <= above || header.rows > capacity) {
    const Geometry& g = options_.geometry;
    std::memset(codes, 0, size_t{capacity} * g.hidden);
    std::memset(scales, 0, size_t{capacity} * (g.hidden / kScaleGroup));
    std::fill(ids, ids + size_t{capacity} * g.choices, -1);
    std::fill(weights, weights + size_t{capacity} * g.choices, 0.0f);
    return {0, options_.geometry.first_layer};
  }
  frame->state = State::kComputing;
  timeline_.note(Event::kReceived, header.request, header.layer, header.rows);
  lock.unlock();
  unpack(*frame, capacity, codes, scales, ids, weights);
  return {uint32_t(frame - frames_ + 1), header.layer};
}

void ExpertWorker::unpack(const Frame& frame, uint32_t capacity, uint8_t* codes, uint8_t* scales,
                          int32_t* ids, float* weights) const {
  const Geometry& g = options_.geometry;
  RequestHeader header;
  std::memcpy(&header, frame.request.data, sizeof header);
  const uint8_t* routes = frame.request.data + sizeof header + header.descriptor_bytes;
  const size_t total = size_t{capacity} * g.choices;
  for (size_t i = 0; i < total; ++i) {
    Route route = {0, 0, 0};
    bool mine = false;
    if (i < header.routes) {
      std::memcpy(&route, routes + i * sizeof route, sizeof route);
      uint32_t owner = route.expert >> kOwnerShift;
      mine = g.groups == 1 || (owner >> options_.group & 1);
    }
    ids[i] = mine ? int32_t(route.expert & kExpertMask) : -1;
    weights[i] = mine ? route.weight : 0.0f;
  }
  const uint8_t* rows = routes + header.route_bytes;
  const size_t groups = g.hidden / kScaleGroup;
  for (uint32_t row = 0; row < header.rows; ++row, rows += g.stride()) {
    std::memcpy(codes + size_t{row} * g.hidden, rows, g.hidden);
    std::memcpy(scales + row * groups, rows + g.hidden, groups);
  }
  const size_t rest = capacity - header.rows;
  std::memset(codes + size_t{header.rows} * g.hidden, 0, rest * g.hidden);
  std::memset(scales + header.rows * groups, 0, rest * groups);
}

void ExpertWorker::respond(uint32_t place, const uint8_t* rows) {
  if (place < 1 || place > kInbox) return;
  Lock lock(hub_.mutex);
  Frame& frame = frames_[place - 1];
  RequestHeader header;
  std::memcpy(&header, frame.request.data, sizeof header);
  std::memcpy(frame.response.data + sizeof(ResponseHeader), rows,
              size_t{header.rows} * options_.geometry.hidden * 2);
  ++answered_;
  timeline_.note(Event::kAnswered, header.request, header.layer, header.rows);
  answer(frame, kStatusOk);
  hub_.progress();
}

void ExpertWorker::answer(Frame& frame, uint16_t status) {
  if (frame.peer < 0 || peers_[frame.peer].endpoint.failed) {
    frame.state = State::kFree;
    return;
  }
  RequestHeader header;
  std::memcpy(&header, frame.request.data, sizeof header);
  header.request = frame.sent->header[1];
  if (status != kStatusOk) header.flags = 0;  // nothing in a refused frame is believed
  encode_response(options_.geometry, header, status, options_.executor, frame.response.data);
  const size_t size = status == kStatusOk ? options_.geometry.response_bytes(header.rows)
                                          : sizeof(ResponseHeader);
  frame.state = State::kAnswering;
  hub_.send(peers_[frame.peer].endpoint, *frame.sent, frame.response, size);
}

uint64_t ExpertWorker::answered() {
  Lock lock(hub_.mutex);
  return answered_;
}

uint64_t ExpertWorker::refused() {
  Lock lock(hub_.mutex);
  return refused_;
}

std::string ExpertWorker::last_refusal() {
  Lock lock(hub_.mutex);
  return last_refusal_;
}

size_t ExpertWorker::timeline(Moment* out, size_t size) {
  Lock lock(hub_.mutex);
  return timeline_.copy(out, size);
}

}  // namespace ds41jax
