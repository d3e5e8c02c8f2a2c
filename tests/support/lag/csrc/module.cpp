// SPDX-License-Identifier: Apache-2.0
// What Python calls. Whatever waits or locks does so without Python's lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "memory.h"
#include "streams.h"

namespace py = pybind11;
using released = py::call_guard<py::gil_scoped_release>;

namespace {

lag::Clock::duration microseconds(double us) {
  return std::chrono::nanoseconds(static_cast<int64_t>(us * 1e3));
}

py::dict memory_use(int device) {
  auto use = lag::memory(device).use();
  auto bytes = [](const lag::MemoryUse::Bytes& of) {
    py::dict result;
    result["current"] = of.current;
    result["peak"] = of.peak;
    result["allocated"] = of.added;
    result["freed"] = of.taken;
    return result;
  };
  py::dict result;
  result["allocated_bytes"] = bytes(use.allocated);
  result["active_bytes"] = bytes(use.active);
  result["reserved_bytes"] = bytes(use.reserved);
  result["total"] = use.total;
  result["num_reused"] = use.num_reused;
  result["num_alloc_retries"] = use.num_retries;
  result["num_ooms"] = use.num_out_of_memory;
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &lag::device_count);
  m.def("current_device", &lag::current_device);
  m.def("set_device", &lag::set_device);
  m.def("was_forked", &lag::was_forked);
  m.def("synchronize", &lag::synchronize_device, released());
  m.def("shut_down", &lag::shut_down, released());
  m.def("become_accelerator", &lag::become_accelerator);

  m.def("set_delays", [](double kernel_us, double copy_us, bool jitter, unsigned seed) {
    lag::settings().kernel_delay_us = kernel_us;
    lag::settings().copy_delay_us = copy_us;
    lag::settings().jitter = jitter;
    lag::seed_delays(seed);
  }, released());
  m.def("set_launch_cost", [](double us) { lag::settings().launch_cost_us = us; });
  m.def("set_bandwidth", [](double to_host, double from_host) {
    lag::settings().bandwidth[lag::kToHost] = to_host;
    lag::settings().bandwidth[lag::kFromHost] = from_host;
  });
  m.def("set_poison", [](bool poison) { lag::settings().poison = poison; });

  m.def("hold", [](int device, int stream) { lag::stream(device, stream).hold(); }, released());
  m.def("release", [](int device, int stream) { lag::stream(device, stream).release(); }, released());
  m.def("release_all", &lag::release_all, released());
  m.def("late", [](int device, int stream, double us, double longest_us) {
    auto now = lag::Clock::now();
    lag::stream(device, stream).be_late(now + microseconds(us), now + microseconds(longest_us));
  }, released());
  m.def("sleep", [](int device, int stream, double us) {
    lag::stream(device, stream).launch(lag::Kind::sleep, [us] {
      lag::sleep_until(lag::Clock::now() + microseconds(us));
    });
  }, released());
  m.def("record_spans", &lag::record_spans);
  m.def("take_spans", [] {
    static const char* names[] = {"kernel", "copy", "sleep"};
    py::list result;
    for (const auto& span : lag::take_spans())
      result.append(py::make_tuple(span.device, span.stream, names[static_cast<size_t>(span.kind)],
                                   span.began_s, span.ended_s));
    return result;
  });
  m.def("current_stream", [](int device) { return lag::current_stream(device).id; });

  m.def("host_register", &lag::host_register, released());
  m.def("host_unregister", &lag::host_unregister, released());
  m.def("is_pinned", [](uintptr_t address, size_t num_bytes) {
    return lag::is_pinned(reinterpret_cast<void*>(address), num_bytes);
  });

  m.def("memory_use", &memory_use);
  m.def("reset_peak", [](int device) { lag::memory(device).reset_peak(); });
  m.def("reset_accumulated", [](int device) { lag::memory(device).reset_accumulated(); });
  m.def("empty_cache", [](int device) { lag::memory(device).empty_cache(); }, released());
  m.def("limit_memory", [](int device, size_t num_bytes) { lag::memory(device).limit(num_bytes); });
  m.def("counters", &lag::counters);
  m.def("host_waits_by_thread", &lag::host_waits_by_thread);
}
