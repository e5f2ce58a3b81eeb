// The GPU's side of an exchange: rows into host memory that the card sees, and planes back.
//
// `send` copies a layer's rows into a mailbox and then raises its number; a host thread takes them
// from there. `await` waits for the answer's number, bounded by the clock, and `take` copies the
// sums. No host call is made, so a step stays one captured graph. Compiled at run time.
//
// A mailbox is a header of 64 words, then codes, scales, ids, weights and sums, each aligned to 16
// bytes at the offsets that the launch passes. Words of the header: 0 the number asked, 1 the number
// answered, 2 the fault, 3 the layer, 4 the rows, 5 the source kind.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Layout {
  u64 size;  // of a mailbox
  u64 codes, scales, ids, weights, sums;
  u32 boxes;
  u32 capacity, hidden, choices;
  u64 patience;  // nanoseconds
};

__device__ u32 counter;  // exchanges so far: numbers run on when a graph is replayed
__device__ u32 arrived;  // blocks of this send that are done

__device__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ void copy(u8* to, const u8* from, u64 bytes) {
  const u64 first = blockIdx.x * u64(blockDim.x) + threadIdx.x;
  const u64 step = u64(gridDim.x) * blockDim.x;
  for (u64 i = first; i < bytes / 16; i += step)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (u64 i = bytes / 16 * 16 + first; i < bytes; i += step) to[i] = from[i];
}

// numbers: layer, rows, fault. ticket: the exchange's number and a fault that kept it from starting.
extern "C" __global__ void ds41jax_send(u8* boxes, Layout layout, const u8* codes,
                                        const u8* scales, const u8* ids, const u8* weights,
                                        const int* numbers, int source, u32* ticket) {
  const u32 number = counter + 1;  // raised below, once every block has read it
  const u32 rows = numbers[1], fault = numbers[2];
  u8* box = boxes + layout.size * (number % layout.boxes);
  if (!fault && rows <= layout.capacity) {
    copy(box + layout.codes, codes, u64(rows) * layout.hidden);
    copy(box + layout.scales, scales, u64(rows) * (layout.hidden / 32));
    copy(box + layout.ids, ids, u64(rows) * layout.choices * 4);
    copy(box + layout.weights, weights, u64(rows) * layout.choices * 4);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(&arrived, 1) != gridDim.x - 1) return;
  arrived = 0;
  ticket[0] = number;
  ticket[1] = fault;
  if (fault) return;  // nothing is asked: the number is given to the next exchange
  counter = number;
  volatile u32* header = reinterpret_cast<volatile u32*>(box);
  header[3] = numbers[0];
  header[4] = rows;
  header[5] = source;
  __threadfence_system();
  header[0] = number;
}

// One thread. fault: 0, or what went wrong; all ones if the host did not answer in time.
extern "C" __global__ void ds41jax_await(u8* boxes, Layout layout, const u32* ticket, int* fault) {
  if (ticket[1]) {
    *fault = ticket[1];
    return;
  }
  const u32 number = ticket[0];
  volatile u32* header =
      reinterpret_cast<volatile u32*>(boxes + layout.size * (number % layout.boxes));
  const u64 end = now() + layout.patience;
  while (header[1] != number) {
    if (now() > end) {
      *fault = 0x7FFFFFFF;
      return;
    }
    __nanosleep(200);
  }
  __threadfence_system();
  *fault = header[2];
}

extern "C" __global__ void ds41jax_take(const u8* boxes, Layout layout, const u32* ticket,
                                        const int* rows, const int* fault, u8* sums, u64 bytes) {
  const u64 live = *fault ? 0 : u64(*rows) * layout.hidden * 4;
  copy(sums, boxes + layout.size * (ticket[0] % layout.boxes) + layout.sums, live);
  const u64 first = live + (blockIdx.x * u64(blockDim.x) + threadIdx.x) * 4;
  for (u64 i = first; i < bytes; i += u64(gridDim.x) * blockDim.x * 4)
    *reinterpret_cast<u32*>(sums + i) = 0;
}
