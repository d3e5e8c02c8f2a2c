// SPDX-License-Identifier: Apache-2.0
// Tensors on the device, and as the threads of its streams see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/version.h>

#include "memory.h"
#include "streams.h"

// Torch of at least this version.
#define LAG_TORCH(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= minor)

namespace lag {

constexpr auto kLag = c10::DeviceType::PrivateUse1;

inline c10::Device device(int index) { return {kLag, static_cast<c10::DeviceIndex>(index)}; }
inline bool is_lag(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLag; }

// device.cpp
c10::Stream to_torch(const Stream& stream);
Stream& from_torch(const c10::Stream& stream);
c10::Allocator& device_allocator();

// tensors.cpp
// Queues work that runs CPU kernels as the calling thread would. Raises what earlier work raised.
// The work must hold no storage of the device: it would keep the memory from being reused, and so
// hide that somebody does not wait.
void launch(Stream& stream, Kind kind, Work work);
// The same bytes as a CPU tensor: for work, and for the host after a wait.
at::Tensor on_host(const at::Tensor& tensor);
at::Tensor alias_of(void* address, const at::Tensor& like);  // a CPU tensor that owns nothing
at::Tensor empty_like_on(const at::Tensor& like, c10::Device device);
void resize_storage(const c10::Storage& storage, size_t num_bytes);
void resize(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides);

// copies.cpp
at::Tensor copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

}  // namespace lag
