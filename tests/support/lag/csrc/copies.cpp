// SPDX-License-Identifier: Apache-2.0
// Copies between host and device, and on the device. Those that CUDA queues are queued here; those
// for which CUDA holds the host up hold it up here.
#include <torch/library.h>

#include "tensors.h"

namespace lag {

namespace {

constexpr size_t kStagedBytes = 64 << 10;  // as much pageable memory is taken at once

bool is_pinned_tensor(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  return storage.nbytes() && is_pinned(storage.data(), storage.nbytes());
}

at::Tensor host_side(const at::Tensor& tensor) { return alias_of(tensor.storage().mutable_data(), tensor); }

// Both streams wait for each other where tensors are of two devices.
void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  count(Count::copies_on_device);
  Stream& from = current_stream(source.device().index());
  Stream& to = current_stream(target.device().index());
  if (&from != &to) to.wait(from.record());
  launch(to, Kind::kernel, [a = on_host(source), b = on_host(target)] { b.copy_(a); });
  if (&from != &to) from.wait(to.record());
}

void copy_with_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Direction direction = is_lag(target) ? kFromHost : kToHost;
  const at::Tensor& host = direction == kFromHost ? source : target;
  int device = (direction == kFromHost ? target : source).device().index();
  Stream& stream = current_stream(device);
  size_t num_bytes = source.numel() * source.element_size();
  bool pinned = is_pinned_tensor(host);
  bool staged = direction == kFromHost && !pinned && num_bytes <= kStagedBytes;
  at::Tensor a = staged                   ? source.detach().clone()
                 : direction == kFromHost ? host_side(source)
                                          : on_host(source);
  at::Tensor b = direction == kFromHost ? on_host(target) : host_side(target);
  count(direction == kFromHost ? Count::copies_from_host : Count::copies_to_host);
  launch(stream, Kind::copy, [=] {
    LinkTime time(device, direction, num_bytes);
    b.copy_(a);
  });
  if (pinned) record_pinned(host.storage().data(), stream);
  if (non_blocking && (pinned || staged))
    count(Count::copies_not_waited_for);
  else
    stream.synchronize();
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy(source, target, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", TORCH_FN(copy));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
}
// torch would call `_copy_from` again to resolve what it was called for.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

at::Tensor copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  c10::DeviceGuard guard(is_lag(target) ? target.device() : source.device());
  if (!target.numel()) return target;
  if (is_lag(source) && is_lag(target))
    copy_on_device(source, target);
  else
    copy_with_host(source, target, non_blocking);
  return target;
}

}  // namespace lag
