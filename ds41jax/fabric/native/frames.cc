#include "frames.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ds41jax {
namespace {

constexpr uint32_t kRequestFlags = kFlagChecksum | kFlagWarmUp | kFlagOwners;

struct Table {
  uint32_t entry[256];
  Table() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (0xEDB88320u & (0u - (c & 1)));
      entry[i] = c;
    }
  }
};

// The checksum of a frame whose own field counts as zero.
template <typename Header>
uint32_t frame_checksum(const uint8_t* data, size_t size) {
  Header header;
  std::memcpy(&header, data, sizeof header);
  header.checksum = 0;
  uint32_t sum = crc32(reinterpret_cast<const uint8_t*>(&header), sizeof header);
  return crc32(data + sizeof header, size - sizeof header, sum);
}

template <typename Header>
void begin_header(Header& header, uint16_t kind) {
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.kind = kind;
  header.header_length = sizeof header;
}

template <typename Header>
const char* check_common(const Header& header, uint16_t kind, uint64_t placement) {
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return "no frame of this protocol";
  if (header.version != kVersion) return "another protocol version";
  if (header.kind != kind) return "a frame of another kind";
  if (header.header_length != sizeof header) return "a header of another length";
  if (header.placement != placement) return "a frame of another placement";
  return nullptr;
}

const char* check_route(const Geometry& geometry, const Route& route, uint32_t row, bool owned) {
  if (route.row != row) return "a route of another row";
  if ((route.expert & kExpertMask) >= geometry.experts) return "an expert that does not exist";
  uint32_t owner = route.expert >> kOwnerShift;
  bool one = owner != 0 && (owner & (owner - 1)) == 0 && owner < (1u << geometry.groups);
  if (owned ? !one : owner != 0) return "a route without exactly one owner";
  if (!std::isfinite(route.weight) || route.weight < 0) return "a weight that is no weight";
  return nullptr;
}

const char* check_rows(const Geometry& geometry, const RequestHeader& header, const uint8_t* data) {
  const uint8_t* routes = data + header.descriptor_bytes;
  bool owned = (header.flags & kFlagOwners) != 0;
  for (uint32_t row = 0; row < header.rows; ++row) {
    RowDescriptor d;
    std::memcpy(&d, data + size_t{row} * sizeof d, sizeof d);
    if (d.row != row || d.source < 1 || d.source > 4 || d.pad != 0 || d.pad2 != 0)
      return "a malformed row descriptor";
    if (d.first_route != row * geometry.choices || d.routes != geometry.choices)
      return "routes that are not contiguous";
    uint64_t seen[kMaxExperts / 64] = {};
    for (uint32_t k = 0; k < geometry.choices; ++k) {
      Route route;
      std::memcpy(&route, routes + (size_t{d.first_route} + k) * sizeof route, sizeof route);
      if (const char* why = check_route(geometry, route, row, owned)) return why;
      uint32_t id = route.expert & kExpertMask;
      if (seen[id / 64] >> (id % 64) & 1) return "an expert chosen twice by a row";
      seen[id / 64] |= uint64_t{1} << (id % 64);
    }
  }
  return nullptr;
}

uint32_t hashed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  return x ^ (x >> 16);
}

}  // namespace

uint32_t crc32(const uint8_t* data, size_t size, uint32_t seed) {
  static const Table table;
  uint32_t c = ~seed;
  for (size_t i = 0; i < size; ++i) c = table.entry[(c ^ data[i]) & 255] ^ (c >> 8);
  return ~c;
}

void encode_request(const Geometry& geometry, uint64_t request, uint32_t flags, const Rows& rows,
                    uint8_t* out) {
  const uint32_t n = rows.rows, k = geometry.choices;
  RequestHeader header = {};
  begin_header(header, kRequest);
  header.request = request;
  header.placement = geometry.placement;
  header.layer = rows.layer;
  header.rows = n;
  header.hidden = geometry.hidden;
  header.dtype = kFp8Groups;
  header.routes = n * k;
  header.descriptor_bytes = n * sizeof(RowDescriptor);
  header.route_bytes = n * k * sizeof(Route);
  header.hidden_bytes = n * geometry.stride();
  header.logical_bytes = header.descriptor_bytes + header.route_bytes + header.hidden_bytes;
  header.wire_bytes = sizeof header + header.logical_bytes;
  header.flags = flags | (geometry.groups > 1 ? kFlagOwners : 0);
  header.stride = geometry.stride();
  uint8_t* at = out + sizeof header;
  for (uint32_t row = 0; row < n; ++row, at += sizeof(RowDescriptor)) {
    RowDescriptor d = {};
    d.row = row;
    d.source = rows.source;
    d.first_route = row * k;
    d.routes = k;
    std::memcpy(at, &d, sizeof d);
  }
  for (uint32_t i = 0; i < n * k; ++i, at += sizeof(Route)) {
    uint32_t expert = rows.ids[i];
    uint32_t owner = 0;
    if (geometry.groups > 1 && expert < geometry.experts)
      owner = 1u << (kOwnerShift + rows.owners[expert]);
    Route route = {i / k, expert | owner, rows.weights[i]};
    std::memcpy(at, &route, sizeof route);
  }
  const size_t scales = geometry.hidden / kScaleGroup;
  for (uint32_t row = 0; row < n; ++row) {
    std::memcpy(at, rows.codes + size_t{row} * geometry.hidden, geometry.hidden);
    at += geometry.hidden;
    std::memcpy(at, rows.scales + row * scales, scales);
    at += scales;
  }
  std::memcpy(out, &header, sizeof header);
  if (flags & kFlagChecksum) {
    header.checksum = frame_checksum<RequestHeader>(out, header.wire_bytes);
    std::memcpy(out, &header, sizeof header);
  }
}

void request_experts(const Geometry& geometry, const uint8_t* frame, int32_t* ids) {
  RequestHeader header;
  std::memcpy(&header, frame, sizeof header);
  const uint8_t* routes = frame + sizeof header + header.descriptor_bytes;
  for (uint32_t i = 0; i < header.routes; ++i) {
    Route route;
    std::memcpy(&route, routes + size_t{i} * sizeof route, sizeof route);
    ids[i] = route.expert & kExpertMask;
  }
}

void readdress(const Geometry& geometry, uint64_t request, const uint8_t* owners, uint8_t* frame) {
  RequestHeader header;
  std::memcpy(&header, frame, sizeof header);
  uint8_t* routes = frame + sizeof header + header.descriptor_bytes;
  for (uint32_t i = 0; i < header.routes; ++i) {
    Route route;
    std::memcpy(&route, routes + size_t{i} * sizeof route, sizeof route);
    uint32_t expert = route.expert & kExpertMask;
    if (expert < geometry.experts)
      route.expert = expert | 1u << (kOwnerShift + owners[expert]);
    std::memcpy(routes + size_t{i} * sizeof route, &route, sizeof route);
  }
  header.request = request;
  header.checksum = 0;
  std::memcpy(frame, &header, sizeof header);
  if (header.flags & kFlagChecksum) {
    header.checksum = frame_checksum<RequestHeader>(frame, header.wire_bytes);
    std::memcpy(frame, &header, sizeof header);
  }
}

const char* check_request(const Geometry& geometry, const uint8_t* data, size_t size) {
  RequestHeader header;
  if (size < sizeof header) return "shorter than a header";
  std::memcpy(&header, data, sizeof header);
  if (const char* why = check_common(header, kRequest, geometry.placement)) return why;
  if (header.layer < geometry.first_layer || header.layer >= geometry.last_layer)
    return "a layer that is not served here";
  if (header.rows < 1 || header.rows > std::min(geometry.capacity, kMaxRows))
    return "more rows than agreed, or none";
  if (header.hidden != geometry.hidden || header.dtype != kFp8Groups || header.pad != 0)
    return "rows of another kind";
  if (header.flags & ~kRequestFlags) return "unknown flags";
  if (((header.flags & kFlagOwners) != 0) != (geometry.groups > 1))
    return "owners where there are no groups, or none where there are";
  const uint32_t n = header.rows;
  const uint64_t body = geometry.request_bytes(n) - sizeof header;
  if (header.routes != n * geometry.choices || header.stride != geometry.stride() ||
      header.descriptor_bytes != n * sizeof(RowDescriptor) ||
      header.route_bytes != header.routes * sizeof(Route) ||
      header.hidden_bytes != n * geometry.stride() || header.logical_bytes != body ||
      header.wire_bytes != sizeof header + body || size != header.wire_bytes)
    return "byte counts that contradict each other";
  uint32_t sum = header.flags & kFlagChecksum ? frame_checksum<RequestHeader>(data, size) : 0;
  if (sum != header.checksum) return "a wrong checksum";
  return check_rows(geometry, header, data + sizeof header);
}

void encode_response(const Geometry& geometry, const RequestHeader& request, uint16_t status,
                     uint64_t executor, uint8_t* out) {
  ResponseHeader header = {};
  begin_header(header, kResponse);
  header.request = request.request;
  header.placement = geometry.placement;
  header.layer = request.layer;
  header.rows = request.rows;
  header.dtype = kBfloat16;
  header.status = status;
  if (status == kStatusOk) header.payload_bytes = uint64_t{request.rows} * geometry.hidden * 2;
  header.logical_bytes = header.payload_bytes;
  header.wire_bytes = sizeof header + header.payload_bytes;
  header.flags = kFlagCompact | (request.flags & kFlagChecksum);
  header.output = geometry.hidden;
  header.stride = geometry.hidden * 2;
  header.executor = executor;
  std::memcpy(out, &header, sizeof header);
  if (header.flags & kFlagChecksum) {
    header.checksum = frame_checksum<ResponseHeader>(out, header.wire_bytes);
    std::memcpy(out, &header, sizeof header);
  }
}

const char* check_response(const Geometry& geometry, uint64_t request, uint32_t layer,
                           uint32_t rows, uint64_t executor, const uint8_t* data, size_t size) {
  ResponseHeader header;
  if (size < sizeof header) return "shorter than a header";
  std::memcpy(&header, data, sizeof header);
  if (const char* why = check_common(header, kResponse, geometry.placement)) return why;
  if (header.request != request || header.layer != layer || header.rows != rows)
    return "an answer to another request";
  if (header.executor != executor) return "an answer of another executor";
  if (header.status == kStatusRefused) return "the worker refused the frame";
  if (header.status != kStatusOk) return "an unknown status";
  if (header.dtype != kBfloat16 || header.output != geometry.hidden ||
      header.stride != geometry.hidden * 2 || header.pad != 0 ||
      (header.flags & ~kFlagChecksum) != kFlagCompact)
    return "rows of another kind";
  const uint64_t payload = uint64_t{rows} * geometry.hidden * 2;
  if (header.payload_bytes != payload || header.logical_bytes != payload ||
      header.wire_bytes != sizeof header + payload || size != header.wire_bytes)
    return "byte counts that contradict each other";
  uint32_t sum = header.flags & kFlagChecksum ? frame_checksum<ResponseHeader>(data, size) : 0;
  return sum == header.checksum ? nullptr : "a wrong checksum";
}

void plan_owners(const Geometry& geometry, uint32_t layer, const int32_t* ids, uint32_t rows,
                 bool balanced, uint32_t alive, uint8_t* owners) {
  const uint32_t groups = geometry.groups;
  uint8_t live[kMaxGroups];
  uint32_t count = 0;
  for (uint32_t g = 0; g < groups; ++g)
    if (alive >> g & 1) live[count++] = g;
  for (uint32_t e = 0; e < geometry.experts; ++e) owners[e] = count ? live[e % count] : 0;
  if (!balanced || count < 2) return;
  uint32_t rows_of[kMaxExperts] = {};
  for (uint32_t i = 0; i < rows * geometry.choices; ++i) {
    uint32_t id = ids[i];
    if (id < geometry.experts) ++rows_of[id];
  }
  // Reading an expert's weights costs four times what a tile of 16 of its rows does.
  struct Entry {
    uint32_t cost, tie, expert;
  };
  Entry entries[kMaxExperts];
  uint32_t used = 0;
  for (uint32_t e = 0; e < geometry.experts; ++e)
    if (rows_of[e])
      entries[used++] = {4 + (rows_of[e] + 15) / 16, hashed(layer << 16 ^ e), e};
  std::sort(entries, entries + used, [](const Entry& a, const Entry& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    return a.tie != b.tie ? a.tie < b.tie : a.expert < b.expert;
  });
  uint32_t load[kMaxGroups] = {};
  for (uint32_t i = 0; i < used; ++i) {
    uint32_t best = 0, least = ~0u;
    for (uint32_t g = 0; g < count; ++g) {
      uint32_t key = load[g] * count + (g + layer) % count;
      if (key < least) least = key, best = g;
    }
    load[best] += entries[i].cost;
    owners[entries[i].expert] = live[best];
  }
}

}  // namespace ds41jax
