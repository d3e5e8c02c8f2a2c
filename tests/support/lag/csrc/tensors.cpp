// SPDX-License-Identifier: Apache-2.0
// Tensors without operators: made, resized, given other storages, viewed; and launched work.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace lag {

namespace {

bool is_autograds_thread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strncmp(name, "pt_autograd", 11) == 0;
}

// CPU kernels sum in another order with another number of threads. On a CPU, backward runs in the thread
// that calls it; here it runs in one of autograd's, which has kept the number that was set when it started.
// It has that of the main thread instead.
int threads_of_kernels() {
  static const thread_local bool is_autograds = is_autograds_thread();
  static const thread_local bool is_main = getpid() == gettid();
  static std::atomic<int> of_main{0};
  int own = at::get_num_threads();
  if (is_main) of_main = own;
  return is_autograds && of_main ? of_main.load() : own;
}

}  // namespace

void launch(Stream& stream, Kind kind, Work work) {
  raise_pending_error();
  pay_launch_cost();
  int num_threads = threads_of_kernels();
  stream.launch(kind, [num_threads, work = std::move(work)] {
    if (at::get_num_threads() != num_threads) at::set_num_threads(num_threads);
    at::AutoDispatchBelowADInplaceOrView below;
    at::NoGradGuard no_grad;
    work();
  });
}

// Conjugation and negation may be still to be done: copies and products of matrices are given such tensors.
at::Tensor alias_of(void* address, const at::Tensor& like) {
  at::Tensor alias = at::for_blob(address, like.sizes())
                         .strides(like.strides())
                         .storage_offset(like.storage_offset())
                         .options(like.options().device(at::kCPU).requires_grad(false))
                         .make_tensor();
  alias._set_conj(like.is_conj());
  alias._set_neg(like.is_neg());
  return alias;
}
at::Tensor on_host(const at::Tensor& tensor) { return alias_of(backing(tensor.storage().data()), tensor); }

at::Tensor empty_like_on(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device).requires_grad(false));
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = device_allocator().allocate(num_bytes);
  size_t kept = std::min(storage.nbytes(), num_bytes);
  if (kept) device_allocator().copy_data(fresh.mutable_get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(num_bytes);
}

void resize(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  size_t needed = at::detail::computeStorageNbytes(sizes, strides, tensor.element_size(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

std::vector<int64_t> dense_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (size_t n = sizes.size(); n-- > 0; next *= std::max<int64_t>(sizes[n], 1)) strides[n] = next;
  return strides;
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> on, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(on.value_or(c10::Device(kLag)));
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> on, std::optional<bool>) {
  c10::DeviceGuard guard(on.value_or(c10::Device(kLag)));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  c10::DeviceGuard guard(self.device());
  if (self.sizes() != sizes) resize(self, sizes, dense_strides(sizes));
  return self;
}
at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                     c10::IntArrayRef strides) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  auto dense = dense_strides(sizes);
  resize(self, sizes, strides.empty() ? c10::IntArrayRef(dense) : strides);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_part(self, std::move(source), 0, {numel}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, empty({0}, self.scalar_type(), {}, self.device(), {}, {}).storage());
}

void record_stream(at::Tensor& self, at::Stream on) {
  const auto& data = self.storage().data_ptr();
  if (data.get()) memory(data.device().index()).record_stream(data.get(), from_torch(on));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}

}  // namespace
}  // namespace lag
