// SPDX-License-Identifier: Apache-2.0
// What torch asks of a device before any operator: streams and events, memory, hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "tensors.h"

namespace lag {

c10::Stream to_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, device(stream.device), stream.id);
}
Stream& from_torch(const c10::Stream& stream) {
  return lag::stream(stream.device_index(), static_cast<int>(stream.id()));
}

namespace {

// -- Streams and events ---------------------------------------------------------------------------

struct Event {
  std::mutex mutex;  // protects what follows
  MomentPtr last;
  bool has_time = false;
};

MomentPtr moment_of(void* event) {
  if (!event) return nullptr;
  auto made = static_cast<Event*>(event);
  std::lock_guard<std::mutex> lock(made->mutex);
  return made->last;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLag; }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < device_count(), "lag: there is no device ", to);
    set_device(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { set_device(to.index()); }
  c10::Device exchangeDevice(c10::Device to) const override {
    c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device of) const noexcept override { return to_torch(current_stream(of.index())); }
  c10::Stream getDefaultStream(c10::Device of) const override { return to_torch(stream(of.index(), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return to_torch(next_stream(of.has_index() ? of.index() : current_device()));
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    int before = exchange_stream(to.device_index(), static_cast<int>(to.id()));
    return to_torch(stream(to.device_index(), before));
  }
#if LAG_TORCH(11)
  void* getStreamNativeHandle(const c10::Stream one) const override { return &from_torch(one); }
#endif
  bool queryStream(const c10::Stream& one) const override { return from_torch(one).is_idle(); }
  void synchronizeStream(const c10::Stream& one) const override { from_torch(one).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event;
    auto made = static_cast<Event*>(*event);
    auto moment = from_torch(on).record();
    std::lock_guard<std::mutex> lock(made->mutex);
    made->last = std::move(moment);
    made->has_time = flag == c10::EventFlag::BACKEND_DEFAULT;
  }
  // An event that was never recorded has passed.
  void block(void* event, const c10::Stream& on) const override {
    if (auto found = moment_of(event)) from_torch(on).wait(found);
  }
  bool queryEvent(void* event) const override {
    auto found = moment_of(event);
    return !found || found->has_passed();
  }
  void synchronizeEvent(void* event) const override {
    if (auto found = moment_of(event)) wait_on_host(*found);
    raise_pending_error();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* one, void* other, const c10::DeviceIndex) const override {
    auto first = moment_of(one), second = moment_of(other);
    TORCH_CHECK(first && second && first->has_passed() && second->has_passed(), "lag: both events must have passed");
    TORCH_CHECK(static_cast<Event*>(one)->has_time && static_cast<Event*>(other)->has_time,
                "lag: both events must have been made with enable_timing=True");
    return std::chrono::duration<double, std::milli>(second->at() - first->at()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    if (data.get()) memory(data.device().index()).record_stream(data.get(), from_torch(on));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- Memory ---------------------------------------------------------------------------------------

void free_on_device(void* address) {
  if (address) memory(device_of(address)).free(address);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    int index = current_device();
    void* address = memory(index).allocate(num_bytes, current_stream(index));
    TORCH_CHECK_WITH(OutOfMemoryError, address || !num_bytes, "lag: out of memory: tried to allocate ", num_bytes,
                     " bytes on device ", index);
    return {address, address, &free_on_device, device(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    char *target = backing(to), *source = backing(from);
    current_stream(-1).launch(Kind::kernel, [=] { std::memcpy(target, source, num_bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int n = 0; n < device_count(); ++n) memory(n).empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream on) override { Guard().recordDataPtrOnStream(data, on); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    auto use = memory(index).use();
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& stat, const MemoryUse::Bytes& bytes) {
      stat.increase(bytes.peak);
      stat.decrease(bytes.peak - bytes.current);
    };
    set(stats.allocated_bytes[0], use.allocated);
    set(stats.active_bytes[0], use.active);
    set(stats.reserved_bytes[0], use.reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override { memory(index).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex index) override { memory(index).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    auto use = memory(index).use();
    return {use.total - use.reserved.current, use.total};
  }
};
DeviceAllocator g_device_allocator;
REGISTER_ALLOCATOR(kLag, &g_device_allocator)

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* address = allocate_pinned(num_bytes);
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};
PinnedAllocator g_pinned_allocator;

// -- Hooks ----------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  // Not of the base class before torch 2.7.
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* address) const override { return address && is_pinned(address, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  c10::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(device_of(address) >= 0, "lag: not an address of the device");
    return device(device_of(address));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    if (num_bytes != storage.nbytes()) resize_storage(storage, num_bytes);
  }
  // Seeds of kernels come from the host's generator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

}  // namespace

void become_accelerator() {
  static std::once_flag once;
  std::call_once(once, [] { at::RegisterPrivateUse1HooksInterface(new Hooks); });
}

c10::Allocator& device_allocator() { return g_device_allocator; }

}  // namespace lag
