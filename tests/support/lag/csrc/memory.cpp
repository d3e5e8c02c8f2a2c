// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>

namespace lag {

namespace {

constexpr size_t kGranule = 512;
constexpr size_t kSegment = 2 << 20;
size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Never unmapped: threads may still write when the process ends.
struct Addresses {
  char *device, *host;
  size_t per_device;
  Addresses() {
    per_device = from_environment("LAG_MEMORY_GIB", 16) << 30;
    device = map(PROT_NONE);
    host = map(PROT_READ | PROT_WRITE);
  }
  size_t size() const { return per_device * device_count(); }

 private:
  char* map(int protection) const {
    void* at = mmap(nullptr, size(), protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::runtime_error("lag: the system gives no addresses; set LAG_MEMORY_GIB");
    return static_cast<char*>(at);
  }
};
Addresses& addresses() {
  static Addresses* one = new Addresses;
  return *one;
}

}  // namespace

int device_of(const void* address) {
  auto at = static_cast<const char*>(address);
  if (at < addresses().device || at >= addresses().device + addresses().size()) return -1;
  return static_cast<int>((at - addresses().device) / addresses().per_device);
}
char* backing(const void* address) {
  if (!address) return nullptr;
  if (device_of(address) < 0) throw std::runtime_error("lag: not an address of the device");
  return addresses().host + (static_cast<const char*>(address) - addresses().device);
}

void MemoryUse::Bytes::add(int64_t bytes) {
  current += bytes;
  added += bytes;
  peak = std::max(peak, current);
}
void MemoryUse::Bytes::take(int64_t bytes) {
  current -= bytes;
  taken += bytes;
}

// -- The caching allocator ------------------------------------------------------------------------

Memory::Memory(int device) : device_(device) {
  start_ = next_ = addresses().device + addresses().per_device * device;
  end_ = start_ + addresses().per_device;
  use_.total = static_cast<int64_t>(addresses().per_device);
}

void* Memory::allocate(size_t num_bytes, Stream& stream) {
  if (num_bytes == 0) return nullptr;
  size_t size = round_up(num_bytes, kGranule);
  for (bool again : {false, true}) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      collect();
      Block* block = take_cached(size, stream);
      if (!block) block = take_segment(size, stream);
      if (block) {
        cut(block, size);
        block->used = true;
        used_[block->start] = block;
        use_.allocated.add(block->size);
        use_.active.add(block->size);
        return block->start;
      }
      ++(again ? use_.num_out_of_memory : use_.num_retries);
    }
    if (!again) empty_cache();
  }
  return nullptr;
}

Memory::Block* Memory::take_cached(size_t size, Stream& stream) {
  Pool& pool = pools_[&stream];
  Block wanted{nullptr, size, nullptr};
  auto found = pool.lower_bound(&wanted);
  if (found == pool.end()) return nullptr;
  Block* block = *found;
  pool.erase(found);
  ++use_.num_reused;
  return block;
}

Memory::Block* Memory::take_segment(size_t size, Stream& stream) {
  size_t segment = round_up(size, kSegment);
  char* at = nullptr;
  // What is left of a longer one stays free: else what is reserved would depend on what was before.
  for (auto found = free_segments_.begin(); found != free_segments_.end(); ++found)
    if (auto [start, length] = *found;
        length >= segment && use_.reserved.current + static_cast<int64_t>(segment) <= use_.total) {
      at = start;
      free_segments_.erase(found);
      if (length > segment) free_segments_[start + segment] = length - segment;
      break;
    }
  if (!at) {
    if (static_cast<size_t>(end_ - next_) < segment) return nullptr;
    if (use_.reserved.current + static_cast<int64_t>(segment) > use_.total) return nullptr;
    at = next_;
    next_ += segment;
  }
  use_.reserved.add(segment);
  if (settings().poison) {
    char* bytes = backing(at);
    stream.launch(Kind::bookkeeping, [bytes, segment] { std::memset(bytes, kPoison, segment); });
  }
  return new Block{at, segment, &stream};
}

void Memory::add_free_segment(char* start, size_t length) {
  auto after = free_segments_.lower_bound(start);
  if (after != free_segments_.end() && after->first == start + length) {
    length += after->second;
    after = free_segments_.erase(after);
  }
  if (after != free_segments_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == start) {
      before->second += length;
      return;
    }
  }
  free_segments_[start] = length;
}

void Memory::cut(Block* block, size_t size) {
  if (block->size - size < kGranule) return;
  auto rest = new Block{block->start + size, block->size - size, block->owner};
  rest->last_use = block->last_use;
  rest->before = block;
  rest->after = block->after;
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->size = size;
  pools_[block->owner].insert(rest);
}

void Memory::free(void* address) {
  if (was_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = used_.find(address);
  if (found == used_.end()) return;
  Block* block = found->second;
  used_.erase(found);
  use_.allocated.take(block->size);
  if (block->others.empty()) return give_back(block);
  std::vector<MomentPtr> moments;
  for (Stream* other : block->others) moments.push_back(other->record());
  block->others.clear();
  deferred_.emplace_back(block, std::move(moments));
}

void Memory::give_back(Block* block) {
  use_.active.take(block->size);
  char* bytes = settings().poison ? backing(block->start) : nullptr;
  auto last_use = std::make_shared<Moment>();
  block->owner->launch(Kind::bookkeeping, [bytes, size = block->size, last_use] {
    if (bytes) std::memset(bytes, kPoison, size);
    last_use->pass();
  });
  block->last_use = last_use;
  block->used = false;
  Pool& pool = pools_[block->owner];
  if (Block* after = block->after; after && !after->used && pool.erase(after)) {
    block->size += after->size;
    block->after = after->after;
    if (block->after) block->after->before = block;
    delete after;
  }
  if (Block* before = block->before; before && !before->used && pool.erase(before)) {
    before->size += block->size;
    before->last_use = last_use;
    before->after = block->after;
    if (before->after) before->after->before = before;
    delete block;
    block = before;
  }
  pool.insert(block);
}

// Gives back what other streams used too, as far as they are done with it.
void Memory::collect() {
  for (size_t n = 0; n < deferred_.size();) {
    auto& [block, moments] = deferred_[n];
    if (!std::all_of(moments.begin(), moments.end(), [](auto& moment) { return moment->has_passed(); })) {
      ++n;
      continue;
    }
    give_back(block);
    std::swap(deferred_[n], deferred_.back());
    deferred_.pop_back();
  }
}

void Memory::record_stream(void* address, Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = used_.find(address);
  if (found != used_.end() && found->second->owner != &stream) found->second->others.insert(&stream);
}

void Memory::empty_cache() {
  wait_for_device(device_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    collect();
  }
  wait_for_device(device_);  // for what was just given back
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entry : pools_) {
    Pool& pool = entry.second;
    for (auto at = pool.begin(); at != pool.end();) {
      Block* block = *at;
      // Other threads may have given it back since.
      bool in_use = block->before || block->after || (block->last_use && !block->last_use->has_passed());
      if (in_use) {
        ++at;
        continue;
      }
      madvise(backing(block->start), block->size, MADV_DONTNEED);
      add_free_segment(block->start, block->size);
      use_.reserved.take(block->size);
      at = pool.erase(at);
      delete block;
    }
  }
}

MemoryUse Memory::use() {
  std::lock_guard<std::mutex> lock(mutex_);
  return use_;
}
void Memory::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* bytes : {&use_.allocated, &use_.active, &use_.reserved}) bytes->peak = bytes->current;
}
void Memory::reset_accumulated() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto* bytes : {&use_.allocated, &use_.active, &use_.reserved}) bytes->added = bytes->taken = 0;
  use_.num_reused = use_.num_retries = use_.num_out_of_memory = 0;
}
void Memory::limit(size_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  use_.total = static_cast<int64_t>(std::min(num_bytes, static_cast<size_t>(end_ - start_)));
}

Memory& memory(int device) {
  static auto* all = [] {
    auto made = new std::vector<std::unique_ptr<Memory>>;
    for (int n = 0; n < device_count(); ++n) made->push_back(std::make_unique<Memory>(n));
    return made;
  }();
  return *all->at(device < 0 ? current_device() : device);
}

// -- Pinned host memory ---------------------------------------------------------------------------

namespace {

struct PinnedBlock {
  size_t size;
  bool is_ours;                    // allocated here
  bool is_freed = false;           // but some of these have not passed
  std::vector<MomentPtr> moments;  // the ends of copies that use it
};
struct Pinned {
  std::mutex mutex;
  std::map<uintptr_t, PinnedBlock> blocks;  // by their first address

  // The block that holds an address, or the end.
  std::map<uintptr_t, PinnedBlock>::iterator find(uintptr_t at) {
    auto after = blocks.upper_bound(at);
    if (after == blocks.begin()) return blocks.end();
    auto one = std::prev(after);
    return at < one->first + one->second.size ? one : blocks.end();
  }
  // Frees what was given up and is no longer in use.
  void collect() {
    for (auto at = blocks.begin(); at != blocks.end();) {
      auto& block = at->second;
      bool done = block.is_freed && std::all_of(block.moments.begin(), block.moments.end(),
                                                [](auto& moment) { return moment->has_passed(); });
      if (!done) {
        ++at;
        continue;
      }
      std::free(reinterpret_cast<void*>(at->first));
      at = blocks.erase(at);
    }
  }
};
Pinned& pinned() {
  static Pinned* one = new Pinned;
  return *one;
}

}  // namespace

void host_register(uintptr_t address, size_t num_bytes) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto next = pinned().blocks.lower_bound(address);
  bool overlaps = pinned().find(address) != pinned().blocks.end() ||
                  (next != pinned().blocks.end() && next->first < address + num_bytes);
  if (overlaps) throw std::runtime_error("lag: part of that memory is registered already");
  pinned().blocks[address] = {num_bytes, false};
}
void host_unregister(uintptr_t address) {
  if (!was_forked())
    for (int n = 0; n < device_count(); ++n) wait_for_device(n);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto found = pinned().blocks.find(address);
  if (found == pinned().blocks.end() || found->second.is_ours)
    throw std::runtime_error("lag: that memory is not registered");
  pinned().blocks.erase(found);
}
bool is_pinned(const void* address, size_t num_bytes) {
  auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto found = pinned().find(at);
  return found != pinned().blocks.end() && !found->second.is_freed &&
         at + num_bytes <= found->first + found->second.size;
}

void* allocate_pinned(size_t num_bytes) {
  if (!num_bytes) return nullptr;
  void* address = std::aligned_alloc(kGranule, round_up(num_bytes, kGranule));
  if (!address) throw std::bad_alloc();
  if (settings().poison) std::memset(address, kPoison, num_bytes);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().collect();
  pinned().blocks[reinterpret_cast<uintptr_t>(address)] = {num_bytes, true};
  return address;
}
void free_pinned(void* address) {
  if (!address || was_forked()) return;
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().blocks.at(reinterpret_cast<uintptr_t>(address)).is_freed = true;
  pinned().collect();
}
void record_pinned(const void* address, Stream& stream) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto found = pinned().find(reinterpret_cast<uintptr_t>(address));
  if (found == pinned().blocks.end() || !found->second.is_ours) return;
  auto& moments = found->second.moments;
  moments.erase(std::remove_if(moments.begin(), moments.end(), [](auto& moment) { return moment->has_passed(); }),
                moments.end());
  moments.push_back(stream.record());
}

}  // namespace lag
