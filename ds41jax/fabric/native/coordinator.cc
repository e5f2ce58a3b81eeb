#include "coordinator.h"

#include <cstring>
#include <random>

namespace ds41jax {
namespace {

constexpr size_t kFaults = 64;  // the last ones are kept
constexpr auto kAttachDeadline = std::chrono::seconds(10);

uint64_t random_word() {
  std::random_device device;
  return uint64_t{device()} << 32 | device() | 1;
}

}  // namespace

Coordinator::Coordinator(const Ucx& ucx, const char* transports, bool spin,
                         const CoordinatorOptions& options)
    : options_(options),
      hub_(ucx, transports, spin, accept, this),
      next_id_(random_word() >> 16) {
  const Geometry& g = options_.geometry;
  for (Wave& wave : waves_) {
    wave.frame = hub_.allocate(g.request_bytes(g.capacity));
    for (uint32_t r = 0; r < options_.ranks; ++r)
      wave.parts[r].buffer = hub_.allocate(g.response_bytes(g.capacity));
  }
  faults_.resize(kFaults);
}

Coordinator::~Coordinator() {
  Lock lock(hub_.mutex);
  for (uint32_t r = 0; r < options_.ranks; ++r) hub_.close(ranks_[r].endpoint);
  hub_.progress();
}

Target Coordinator::accept(void* self, uint64_t token, uint64_t request, size_t size) {
  auto* me = static_cast<Coordinator*>(self);
  for (uint32_t r = 0; r < me->options_.ranks; ++r) {
    Rank& rank = me->ranks_[r];
    if (rank.token != token || !rank.endpoint.handle) continue;
    for (Wave& wave : me->waves_) {
      Part& part = wave.parts[r];
      if (!wave.taken || wave.id != request || !part.expected || part.accepted) continue;
      if (size > part.buffer.size) {
        rank.endpoint.failed = true;
        rank.reason = "sent " + std::to_string(size) + " bytes, more than any answer has";
        return {};
      }
      part.accepted = true;
      return {&part.received, &part.buffer};
    }
  }
  return {};  // late, or nobody's: dropped
}

std::string Coordinator::attach(uint32_t r, const uint8_t* address, size_t size, uint64_t token) {
  Lock lock(hub_.mutex);
  Rank& rank = ranks_[r];
  if (rank.up) return "the rank is attached already";
  hub_.close(rank.endpoint);
  rank.token = token;
  rank.reason.clear();
  try {
    hub_.connect(address, size, rank.endpoint);
  } catch (const std::exception& error) {
    return error.what();
  }
  Wave* wave = free_wave(lock);
  if (!wave) return "every buffer is in use";
  const Geometry& g = options_.geometry;
  std::vector<uint8_t> zeros(g.stride());
  std::vector<int32_t> ids(g.choices);
  std::vector<float> weights(g.choices);
  for (uint32_t k = 0; k < g.choices; ++k) ids[k] = k;
  std::memset(owners_, r / per_group(), sizeof owners_);
  wave->rows = 1;
  wave->layer = g.first_layer;
  uint32_t flags = kFlagWarmUp | (options_.checksum ? kFlagChecksum : 0);
  encode_request(g, wave->id, flags,
                 {g.first_layer, 1, 4, zeros.data(), zeros.data(), ids.data(), weights.data(),
                  owners_},
                 wave->frame.data);
  wave->deadline = Clock::now() + kAttachDeadline;
  deliver(*wave, r);
  while (true) {
    hub_.progress();
    bool pending, failed;
    settle(*wave, pending, failed);
    if (!pending) break;
    if (Clock::now() > wave->deadline) {
      fail(r, "no answer to the first frame");
      break;
    }
    hub_.pause(lock, wave->deadline);
  }
  wave->taken = false;
  if (!rank.endpoint.handle) return rank.reason;
  rank.up = true;
  return "";
}

void Coordinator::detach(uint32_t r, const char* why) {
  Lock lock(hub_.mutex);
  fail(r, why);
}

bool Coordinator::up(uint32_t r) {
  Lock lock(hub_.mutex);
  if (ranks_[r].endpoint.handle && ranks_[r].endpoint.failed)
    fail(r, hub_.why(ranks_[r].endpoint.status));
  return ranks_[r].up;
}

std::string Coordinator::down_reason(uint32_t r) {
  Lock lock(hub_.mutex);
  return ranks_[r].reason;
}

Coordinator::Wave* Coordinator::free_wave(Lock& lock) {
  const auto until = Clock::now() + std::chrono::milliseconds(options_.deadline_ms);
  while (true) {
    hub_.progress();
    for (Wave& wave : waves_) {
      bool busy = wave.taken;
      for (Part& part : wave.parts) busy |= part.sent->busy || part.received.busy;
      if (busy) continue;
      for (Part& part : wave.parts) part.expected = part.accepted = false;
      wave.taken = true;
      wave.id = next_id_++;
      return &wave;
    }
    if (Clock::now() > until) return nullptr;
    hub_.pause(lock, until);
  }
}

uint32_t Coordinator::alive_groups() const {
  uint32_t alive = 0;
  for (uint32_t g = 0; g < options_.geometry.groups; ++g) {
    bool whole = true;
    for (uint32_t i = 0; i < per_group(); ++i) whole &= ranks_[g * per_group() + i].up;
    if (whole) alive |= 1u << g;
  }
  return alive;
}

void Coordinator::deliver(Wave& wave, uint32_t r) {
  Part& part = wave.parts[r];
  part.expected = true;
  part.accepted = false;
  part.sent->header[0] = ranks_[r].token;
  part.sent->header[1] = wave.id;
  hub_.send(ranks_[r].endpoint, *part.sent, wave.frame,
            options_.geometry.request_bytes(wave.rows));
  if (!part.sent->busy && part.sent->status != UCS_OK) {
    ranks_[r].endpoint.failed = true;
    ranks_[r].endpoint.status = part.sent->status;
  }
}

void Coordinator::post(Wave& wave, uint32_t alive) {
  for (uint32_t r = 0; r < options_.ranks; ++r)
    if (alive >> (r / per_group()) & 1) deliver(wave, r);
  wave.deadline = Clock::now() + std::chrono::milliseconds(options_.deadline_ms);
}

uint64_t Coordinator::send(const Rows& given) {
  Lock lock(hub_.mutex);
  const Geometry& g = options_.geometry;
  uint32_t alive = alive_groups();
  if (!alive) {
    std::string why = "no complete group of expert workers is connected";
    for (uint32_t r = 0; r < options_.ranks; ++r)
      if (!ranks_[r].up) why += "; rank " + std::to_string(r) + ": " + ranks_[r].reason;
    return record(why);
  }
  if (given.rows > g.capacity)
    return record("a step has " + std::to_string(given.rows) + " rows, the fabric's buffers " +
                  std::to_string(g.capacity));
  Wave* wave = free_wave(lock);
  if (!wave) return record("every exchange buffer is in use");
  wave->layer = given.layer;
  wave->rows = given.rows;
  if (given.rows) {
    Rows rows = given;
    rows.owners = owners_;
    plan_owners(g, rows.layer, rows.ids, rows.rows, options_.balanced, alive, owners_);
    encode_request(g, wave->id, options_.checksum ? kFlagChecksum : 0, rows, wave->frame.data);
    post(*wave, alive);
    timeline_.note(Event::kSent, wave->id, wave->layer, wave->rows);
  }
  return uint64_t(wave - waves_ + 1) << 32 | uint32_t(wave->id);
}

void Coordinator::settle(Wave& wave, bool& pending, bool& failed) {
  pending = failed = false;
  for (uint32_t r = 0; r < options_.ranks; ++r) {
    Part& part = wave.parts[r];
    if (!part.expected) continue;
    Rank& rank = ranks_[r];
    if (rank.endpoint.handle && rank.endpoint.failed)
      fail(r, rank.reason.empty() ? hub_.why(rank.endpoint.status) : rank.reason);
    if (rank.endpoint.handle && part.accepted && !part.received.busy) {
      const char* why = hub_.why(part.received.status);
      if (part.received.status == UCS_OK)
        why = check_response(options_.geometry, wave.id, wave.layer, wave.rows,
                             options_.executor + r, part.buffer.data, part.received.size);
      if (!why) continue;
      fail(r, why);
    }
    if (!rank.endpoint.handle)
      failed = true;
    else
      pending = true;
  }
}

void Coordinator::fail(uint32_t r, const std::string& why) {
  Rank& rank = ranks_[r];
  if (rank.endpoint.handle) rank.reason = why;
  hub_.close(rank.endpoint);
  rank.up = false;
  for (Wave& wave : waves_) hub_.let_go(wave.parts[r].sent);
}

Coordinator::Wave* Coordinator::take_over(Wave& lost, Lock& lock) {
  // Into other buffers: these may still be on their way to the ranks that are left.
  Wave* wave = alive_groups() ? free_wave(lock) : nullptr;
  const uint32_t alive = alive_groups();
  lost.taken = false;
  if (!wave) return nullptr;
  if (!alive) {
    wave->taken = false;
    return nullptr;
  }
  const Geometry& g = options_.geometry;
  wave->layer = lost.layer;
  wave->rows = lost.rows;
  std::memcpy(wave->frame.data, lost.frame.data, g.request_bytes(lost.rows));
  std::vector<int32_t> ids(size_t{lost.rows} * g.choices);
  request_experts(g, wave->frame.data, ids.data());
  plan_owners(g, wave->layer, ids.data(), wave->rows, options_.balanced, alive, owners_);
  readdress(g, wave->id, owners_, wave->frame.data);
  ++takeovers_;
  post(*wave, alive);
  return wave;
}

std::string Coordinator::lost_ranks() const {
  std::string why;
  for (uint32_t r = 0; r < options_.ranks; ++r) {
    if (ranks_[r].endpoint.handle) continue;
    if (!why.empty()) why += "; ";
    why += "expert worker " + std::to_string(r) + ": " + ranks_[r].reason;
  }
  return why;
}

uint32_t Coordinator::wait(uint64_t ticket, uint32_t rows, float* out) {
  Lock lock(hub_.mutex);
  const uint32_t place = ticket >> 32;
  if (place == 0 && uint32_t(ticket)) return uint32_t(ticket);
  Wave* wave = place >= 1 && place <= kWaves ? &waves_[place - 1] : nullptr;
  if (!wave || !wave->taken || uint32_t(wave->id) != uint32_t(ticket) || wave->rows != rows)
    return record("a ticket that was never given");
  timeline_.note(Event::kAwaited, wave->id, wave->layer, rows);
  while (true) {
    hub_.progress();
    bool pending, failed;
    settle(*wave, pending, failed);
    if (failed) {
      std::string why = lost_ranks();
      wave = take_over(*wave, lock);
      if (!wave) return record(why);
      continue;
    }
    if (!pending) break;
    if (Clock::now() > wave->deadline) {
      for (uint32_t r = 0; r < options_.ranks; ++r) {
        Part& part = wave->parts[r];
        if (part.expected && !(part.accepted && !part.received.busy))
          fail(r, "no answer within " + std::to_string(options_.deadline_ms) + " ms");
      }
      continue;
    }
    hub_.pause(lock, wave->deadline);
  }
  sum(*wave, out);
  timeline_.note(Event::kSummed, wave->id, wave->layer, rows);
  wave->taken = false;
  return 0;
}

void Coordinator::sum(const Wave& wave, float* out) const {
  const size_t count = size_t{wave.rows} * options_.geometry.hidden;
  bool first = true;
  for (const Part& part : wave.parts) {
    if (!part.expected) continue;
    const uint8_t* plane = part.buffer.data + sizeof(ResponseHeader);
    for (size_t i = 0; i < count; ++i) {
      uint16_t half;
      std::memcpy(&half, plane + 2 * i, sizeof half);
      uint32_t bits = uint32_t{half} << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      out[i] = first ? value : out[i] + value;
    }
    first = false;
  }
}

uint32_t Coordinator::record(const std::string& why) {
  fault_count_ = fault_count_ % 0x7FFFFFFF + 1;
  faults_[fault_count_ % kFaults] = why;
  return fault_count_;
}

std::string Coordinator::fault(uint32_t number) {
  Lock lock(hub_.mutex);
  return number ? faults_[number % kFaults] : "";
}

uint64_t Coordinator::takeovers() {
  Lock lock(hub_.mutex);
  return takeovers_;
}

size_t Coordinator::timeline(Moment* out, size_t size) {
  Lock lock(hub_.mutex);
  return timeline_.copy(out, size);
}

}  // namespace ds41jax
