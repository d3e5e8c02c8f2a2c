// SPDX-License-Identifier: Apache-2.0
// The device's memory: a caching allocator in stream order, as CUDA's; and pinned host memory.
//
// Device addresses can be neither read nor written: what kernels use lies a constant away. A host
// that looks at device memory is ended by the system, however far the streams have come.
//
// Locks: those of this file are taken before a stream's; a stream's thread never takes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "streams.h"

namespace lag {

constexpr unsigned char kPoison = 0xDB;

char* backing(const void* address);  // where the bytes of a device address are
int device_of(const void* address);  // -1: of none

struct MemoryUse {
  struct Bytes {
    int64_t current = 0, peak = 0, added = 0, taken = 0;
    void add(int64_t bytes);
    void take(int64_t bytes);
  };
  Bytes allocated;  // by tensors
  Bytes active;     // also by those that are freed but that another stream may still use
  Bytes reserved;   // also what is kept for reuse
  int64_t total = 0, num_reused = 0, num_retries = 0, num_out_of_memory = 0;
};

// Freed memory goes to the next request of the same stream at once, whatever is still queued there.
class Memory {
 public:
  explicit Memory(int device);
  void* allocate(size_t num_bytes, Stream& stream);  // nullptr: out of memory, or no bytes
  void free(void* address);
  void record_stream(void* address, Stream& stream);
  void empty_cache();  // waits for the device
  MemoryUse use();
  void reset_peak();
  void reset_accumulated();
  void limit(size_t num_bytes);  // the device has that much memory

 private:
  struct Block {
    char* start;
    size_t size;
    Stream* owner;
    Block *before = nullptr, *after = nullptr;  // in the same segment
    bool used = false;
    std::set<Stream*> others;      // that use it too
    MomentPtr last_use = nullptr;  // by its owner, when it is free
  };
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return a->size != b->size ? a->size < b->size : a->start < b->start;
    }
  };
  using Pool = std::set<Block*, BySize>;
  // All under the lock.
  Block* take_cached(size_t size, Stream& stream);
  Block* take_segment(size_t size, Stream& stream);
  void add_free_segment(char* start, size_t length);
  void cut(Block* block, size_t size);
  void give_back(Block* block);
  void collect();

  std::mutex mutex_;
  char *start_, *end_, *next_;
  const int device_;
  std::map<Stream*, Pool> pools_;
  std::unordered_map<void*, Block*> used_;
  std::vector<std::pair<Block*, std::vector<MomentPtr>>> deferred_;
  std::map<char*, size_t> free_segments_;  // neighbours are one
  MemoryUse use_;
};
Memory& memory(int device);

// Registered by whoever owns it: that is the promise to keep it until no copy uses it any more.
void host_register(uintptr_t address, size_t num_bytes);
void host_unregister(uintptr_t address);  // waits for all devices: copies may be under way
bool is_pinned(const void* address, size_t num_bytes);

// Pinned memory that is allocated here is kept until the copies that use it are done.
void* allocate_pinned(size_t num_bytes);
void free_pinned(void* address);
void record_pinned(const void* address, Stream& stream);  // inside of a block or of none

}  // namespace lag
