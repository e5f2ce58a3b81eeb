// The wire format, version 3, little endian: what a coordinator and a worker send each other.
//
// A request is a header, one descriptor a row, one entry a route, and the rows themselves as FP8
// codes followed by their power-of-two scales. A response is a header and bfloat16 rows. Frames are
// checked whole and refused, never repaired. Nothing here allocates.

#ifndef DS41JAX_FRAMES_H_
#define DS41JAX_FRAMES_H_

#include <cstddef>
#include <cstdint>

namespace ds41jax {

constexpr char kMagic[8] = {'D', 'S', '4', '1', 'R', 'T', 'E', '3'};
constexpr uint16_t kVersion = 3;
constexpr uint16_t kRequest = 1, kResponse = 2;
constexpr uint16_t kBfloat16 = 1, kFp8Groups = 7;
constexpr uint32_t kScaleGroup = 32;
constexpr uint32_t kExpertMask = 511, kOwnerShift = 9;
constexpr uint32_t kMaxRows = 4096, kMaxExperts = 512, kMaxChoices = 16, kMaxGroups = 3;

constexpr uint32_t kFlagChecksum = 1u << 0, kFlagWarmUp = 1u << 1;
constexpr uint32_t kFlagCompact = 1u << 16, kFlagOwners = 1u << 18;

constexpr uint16_t kStatusOk = 0, kStatusRefused = 1;

#pragma pack(push, 1)
struct RequestHeader {
  char magic[8];
  uint16_t version, kind;
  uint32_t header_length;
  uint64_t request, placement;
  uint32_t layer, rows, hidden;
  uint16_t dtype, pad;
  uint32_t routes, descriptor_bytes, route_bytes;
  uint64_t hidden_bytes, logical_bytes, wire_bytes;
  uint32_t flags, stride, checksum;
};

struct RowDescriptor {
  uint64_t row;
  uint16_t source, pad;  // source: 1 decode, 2 prefill, 3 verification, 4 bench
  uint64_t source_request, position;
  uint32_t first_route, routes, pad2;
};

struct Route {
  uint32_t row, expert;  // expert id, and above it one bit that names the owning group
  float weight;
};

struct ResponseHeader {
  char magic[8];
  uint16_t version, kind;
  uint32_t header_length;
  uint64_t request, placement;
  uint32_t layer, rows;
  uint16_t dtype, status;
  uint64_t payload_bytes, logical_bytes, wire_bytes;
  uint32_t flags, output, stride;
  uint64_t executor;
  uint32_t checksum, pad;
};
#pragma pack(pop)

static_assert(sizeof(RequestHeader) == 96 && sizeof(ResponseHeader) == 96);
static_assert(sizeof(RowDescriptor) == 40 && sizeof(Route) == 12);

// What both ends agree on at the handshake.
struct Geometry {
  uint32_t hidden, experts, choices, groups;
  uint32_t first_layer, last_layer;  // served: first <= layer < last
  uint32_t capacity;                 // rows of a frame at most
  uint64_t placement;

  size_t stride() const { return hidden + hidden / kScaleGroup; }
  size_t request_bytes(uint32_t rows) const {
    return sizeof(RequestHeader) +
           rows * (sizeof(RowDescriptor) + choices * sizeof(Route) + stride());
  }
  size_t response_bytes(uint32_t rows) const {
    return sizeof(ResponseHeader) + size_t{rows} * hidden * 2;
  }
};

// The rows of a layer as the step holds them, each array C-contiguous.
struct Rows {
  uint32_t layer, rows;
  uint16_t source;
  const uint8_t* codes;   // [rows, hidden]
  const uint8_t* scales;  // [rows, hidden / 32]
  const int32_t* ids;     // [rows, choices]
  const float* weights;   // [rows, choices]
  const uint8_t* owners;  // [experts] owning group of each expert
};

uint32_t crc32(const uint8_t* data, size_t size, uint32_t seed = 0);

// Writes a request of request_bytes(rows.rows) bytes at `out`.
void encode_request(const Geometry& geometry, uint64_t request, uint32_t flags, const Rows& rows,
                    uint8_t* out);

// The expert of every route of a request, [rows, choices].
void request_experts(const Geometry& geometry, const uint8_t* frame, int32_t* ids);

// Gives a request another id and other owners.
void readdress(const Geometry& geometry, uint64_t request, const uint8_t* owners, uint8_t* frame);

// Why these bytes are no request that a worker of this geometry may serve; null if they are.
const char* check_request(const Geometry& geometry, const uint8_t* data, size_t size);

// Writes the header of a response whose payload, if any, follows it already.
void encode_response(const Geometry& geometry, const RequestHeader& request, uint16_t status,
                     uint64_t executor, uint8_t* out);

// Why these bytes are no answer to the request from this executor; null if they are.
const char* check_response(const Geometry& geometry, uint64_t request, uint32_t layer,
                           uint32_t rows, uint64_t executor, const uint8_t* data, size_t size);

// Which group computes which expert, from layer and histogram alone: dearest experts first, each to
// the least loaded group of `alive` (a bit each). `owners` gets one group an expert.
void plan_owners(const Geometry& geometry, uint32_t layer, const int32_t* ids, uint32_t rows,
                 bool balanced, uint32_t alive, uint8_t* owners);

}  // namespace ds41jax

#endif  // DS41JAX_FRAMES_H_
