// The cluster cache: which selected tokens lie in device slots, and the fetch of those that don't.
//
//   clusterkv_place_tokens  grid (B * Hkv), 512 threads: one block a KV head
//
//     wanted    the selections of all its query heads, entered into a hash table of tokens, so that
//               a token wanted twice is fetched once; an entry keeps its first place in the list
//     held      every slot looks up its token: a hit
//     missed    first places without a slot, counted in order, take the free slots in order
//     ages      wanted slots 0, the others one more; a slot that is too old becomes free
//
//   clusterkv_fetch_rows    grid (B * Hkv, 16), 256 threads: a warp copies the K and V row of a
//                           missed token, 16 bytes a lane; the rows lie side by side in the store,
//                           which may be host memory mapped to the device
//
// The order in which threads enter tokens changes where entries lie, never what they say.
#pragma once

#include "device.cuh"

namespace clusterkv {

constexpr int kPlaceThreads = 512;
constexpr int kFetchThreads = 256;
constexpr int kFetchBlocks = 16;
constexpr size_t kPlaceSharedBytes = 44 << 10;

struct TokenEntry {
  int token, first_place, slot;  // -1, INT_MAX, -1 until known
};

struct Fetch {
  int token, slot;
};

struct RecallProblem {
  const int* indices;  // [B,Hs,S] = [B,Hkv,wanted]
  int* slot_indices;   // [B,Hkv,N]
  int* slot_ages;      // [B,Hkv,N]
  int* slots;          // [B,Hs,S]
  int* hits;           // [B,Hkv]
  int* misses;         // [B,Hkv]
  // Workspace.
  TokenEntry* table;  // [B,Hkv,table_size], or null: shared memory
  Fetch* fetches;     // [B,Hkv,wanted]
  int* free_slots;    // [B,Hkv,N]
  int lists, wanted, num_slots, kv_len, table_size, recall_steps;
};

// The entry of a token, which is new where the token wasn't there. At least half of the table
// stays empty.
__device__ inline TokenEntry* enter_token(TokenEntry* table, int table_size, int token) {
  unsigned at = unsigned(token) * 2654435761u & unsigned(table_size - 1);
  while (true) {
    const int found = atomicCAS(&table[at].token, -1, token);
    if (found == -1 || found == token) return &table[at];
    at = (at + 1) & unsigned(table_size - 1);
  }
}

__device__ inline TokenEntry* find_token(TokenEntry* table, int table_size, int token) {
  unsigned at = unsigned(token) * 2654435761u & unsigned(table_size - 1);
  while (table[at].token != token) {
    if (table[at].token == -1) return nullptr;
    at = (at + 1) & unsigned(table_size - 1);
  }
  return &table[at];
}

// Numbers the threads' places that satisfy a condition, in order; returns how many there are.
template <class Condition, class Action>
__device__ int enumerate(int count, const Condition& holds, const Action& act) {
  int before = 0;
  for (int first = 0; first < count; first += kPlaceThreads) {
    const int i = first + int(threadIdx.x);
    const bool is_counted = i < count && holds(i);
    int total;
    const int rank = before + block_exclusive_sum(is_counted ? 1 : 0, &total);
    if (is_counted) act(i, rank);
    before += total;
  }
  return before;
}

// Enters the wanted tokens; `wanted(i)` is -1 for no token.
template <class Wanted>
__device__ void enter_wanted(const RecallProblem& p, TokenEntry* table, const Wanted& wanted) {
  for (int i = threadIdx.x; i < p.table_size; i += kPlaceThreads) {
    table[i] = TokenEntry{-1, INT32_MAX, -1};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.wanted; i += kPlaceThreads) {
    if (wanted(i) >= 0) {
      atomicMin(&enter_token(table, p.table_size, wanted(i))->first_place, i);
    }
  }
  __syncthreads();
}

// Slots of the tokens that are held already.
__device__ inline void find_hits(const RecallProblem& p, TokenEntry* table, const int* held) {
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kPlaceThreads) {
    if (held[slot] < 0) continue;
    TokenEntry* entry = find_token(table, p.table_size, held[slot]);
    if (entry != nullptr) atomicMax(&entry->slot, slot);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kPlaceThreads)
    clusterkv_place_tokens(const __grid_constant__ RecallProblem p) {
  CLUSTERKV_SHARED(memory);
  const int64_t list = blockIdx.x;
  TokenEntry* table =
      p.table ? p.table + list * p.table_size : reinterpret_cast<TokenEntry*>(memory);
  int* held = p.slot_indices + list * p.num_slots;
  int* ages = p.slot_ages + list * p.num_slots;
  int* free_slots = p.free_slots + list * p.num_slots;
  Fetch* fetches = p.fetches + list * p.wanted;
  const auto wanted = [&](int i) {
    const int token = p.indices[list * p.wanted + i];
    return token < p.kv_len ? token : -1;
  };
  enter_wanted(p, table, wanted);
  find_hits(p, table, held);

  const int num_free = enumerate(
      p.num_slots, [&](int slot) { return held[slot] < 0; },
      [&](int slot, int rank) { free_slots[rank] = slot; });
  const auto is_first = [&](int i) {
    return wanted(i) >= 0 && find_token(table, p.table_size, wanted(i))->first_place == i;
  };
  const int distinct = enumerate(p.wanted, is_first, [](int, int) {});
  const auto is_missed = [&](int i) {
    return is_first(i) && find_token(table, p.table_size, wanted(i))->slot < 0;
  };
  __syncthreads();
  // Slots are handed out after counting: an entry's slot must not change while others look at it.
  const int misses = enumerate(p.wanted, is_missed, [&](int i, int rank) {
    fetches[rank] = Fetch{wanted(i), rank < num_free ? free_slots[rank] : -1};
  });
  __syncthreads();
  for (int i = threadIdx.x; i < min(misses, num_free); i += kPlaceThreads) {
    find_token(table, p.table_size, fetches[i].token)->slot = fetches[i].slot;
    held[fetches[i].slot] = fetches[i].token;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.wanted; i += kPlaceThreads) {
    const int token = wanted(i);
    p.slots[list * p.wanted + i] = token < 0 ? -1 : find_token(table, p.table_size, token)->slot;
  }
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kPlaceThreads) {
    const TokenEntry* entry =
        held[slot] < 0 ? nullptr : find_token(table, p.table_size, held[slot]);
    ages[slot] = entry != nullptr && entry->slot == slot ? 0 : ages[slot] + 1;
    if (ages[slot] >= p.recall_steps) held[slot] = -1;
  }
  if (threadIdx.x == 0) {
    p.hits[list] = distinct - misses;
    p.misses[list] = misses;
  }
}

template <class T>
struct FetchProblem {
  Rows<const T> keys, values;      // [B,Hkv,T,D], the store
  Rows<T> slot_keys, slot_values;  // [B,Hkv,N,D]
  const Fetch* fetches;            // [B,Hkv,wanted]
  const int* misses;               // [B,Hkv]
  int heads, wanted, head_dim;
  bool is_aligned;
};

template <class T>
__global__ void __launch_bounds__(kFetchThreads)
    clusterkv_fetch_rows(const __grid_constant__ FetchProblem<T> p) {
  const int list = blockIdx.x, batch = list / p.heads, head = list % p.heads;
  const int lane = threadIdx.x % 32, step = p.is_aligned ? Chunk<T>::kSize : 1;
  const int per_row = p.head_dim / step, num_warps = int(gridDim.y) * kFetchThreads / 32;
  const int misses = p.misses[list];
  const int warp = (int(blockIdx.y) * kFetchThreads + int(threadIdx.x)) / 32;
  for (int i = warp; i < misses; i += num_warps) {
    const Fetch fetch = p.fetches[int64_t(list) * p.wanted + i];
    if (fetch.slot < 0) continue;
    const T* key = p.keys.at(batch, head, fetch.token);
    const T* value = p.values.at(batch, head, fetch.token);
    T* to_key = p.slot_keys.at(batch, head, fetch.slot);
    T* to_value = p.slot_values.at(batch, head, fetch.slot);
    for (int k = lane; k < 2 * per_row; k += 32) {
      const int channel = (k < per_row ? k : k - per_row) * step;
      const T* from = (k < per_row ? key : value) + channel;
      T* to = (k < per_row ? to_key : to_value) + channel;
      if (p.is_aligned) {
        *reinterpret_cast<Chunk<T>*>(to) = *reinterpret_cast<const Chunk<T>*>(from);
      } else {
        *to = *from;
      }
    }
  }
}

// -- launches -----------------------------------------------------------------------------------

// Entries of the hash table: a power of two, at least twice the wanted tokens.
inline int64_t table_size_for(int64_t wanted) {
  int64_t size = 64;
  while (size < 2 * wanted) size *= 2;
  return size;
}

inline bool fits_shared(int64_t table_size) {
  return table_size * int64_t(sizeof(TokenEntry)) <= int64_t(kPlaceSharedBytes);
}

template <class T>
void launch_recall(const RecallProblem& p, const FetchProblem<T>& fetch, cudaStream_t stream) {
  if (p.lists == 0) return;
  const size_t bytes = p.table ? 0 : size_t(p.table_size) * sizeof(TokenEntry);
  CLUSTERKV_LAUNCH(clusterkv_place_tokens, dim3(unsigned(p.lists)), dim3(kPlaceThreads), bytes,
                   stream, p);
  CLUSTERKV_LAUNCH((clusterkv_fetch_rows<T>), dim3(unsigned(p.lists), kFetchBlocks),
                   dim3(kFetchThreads), 0, stream, fetch);
}

}  // namespace clusterkv
