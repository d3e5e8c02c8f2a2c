// SPDX-License-Identifier: Apache-2.0
// Operators: one kernel for all of them, which queues the CPU's kernel on a stream. What the results
// will be, the Meta kernel says; so the host need not wait for them.
//
// Where sizes depend on data, or a number is asked for, the host waits and the operator runs at once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

#include "tensors.h"

namespace lag {
namespace {

using torch::jit::Stack;

// -- Arguments ------------------------------------------------------------------------------------

// The same value with each tensor in it, also in lists, replaced.
template <class F>
c10::IValue each_tensor(const c10::IValue& value, const F& convert) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(convert(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorVector()) list.push_back(one.defined() ? convert(one) : one);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& one : value.toOptionalTensorVector())
      list.push_back(one && one->defined() ? std::optional<at::Tensor>(convert(*one)) : one);
    return list;
  }
  return value;
}

// An argument that is given twice is one tensor twice in the result too.
template <class F>
Stack convert(const Stack& arguments, c10::Device device, const F& convert_tensor) {
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;
  auto once = [&](const at::Tensor& tensor) {
    for (auto& [of, as] : seen)
      if (of.is_same(tensor)) return as;
    at::Tensor as = convert_tensor(tensor);
    seen.emplace_back(tensor, as);
    return as;
  };
  Stack result;
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kLag)
      result.emplace_back(device);
    else if (value.isGenerator() && device.is_meta())
      result.emplace_back();
    else
      result.push_back(each_tensor(value, once));
  }
  return result;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The argument that a result is; only in-place operators and those with `out` have such results.
const c10::IValue& argument_of(const c10::FunctionSchema& schema, const c10::AliasInfo& alias, const Stack& arguments) {
  for (size_t n = 0; n < arguments.size(); ++n) {
    const auto* theirs = schema.arguments()[n].alias_info();
    if (theirs && *theirs == alias) return arguments[n];
  }
  TORCH_CHECK(false, "lag: a result of ", schema.name(), " is none of its arguments");
}

c10::Device device_of_call(const Stack& arguments) {
  c10::Device found = device(current_device());
  bool has_tensor = false;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!has_tensor && is_lag(tensor)) found = tensor.device(), has_tensor = true;
      return tensor;
    });
    bool names_device = value.isDevice() && value.toDevice().type() == kLag && value.toDevice().has_index();
    if (!has_tensor && names_device) found = value.toDevice();
  }
  return found;
}

// Numbers, tensors of no dimension and indices may be on the host. The copy has no object in Python, which a
// thread of a stream could not free.
at::Tensor from_host_for_kernel(const at::Tensor& tensor, const c10::OperatorHandle& op) {
  bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  bool indexes = op.operator_name().name.find("index") != std::string::npos;
  TORCH_CHECK(is_number || tensor.dim() == 0 || indexes, "lag: ", op.operator_name(), " was given a tensor on ",
              tensor.device());
  at::Tensor as = tensor.detach().clone();
  if (is_number) as.unsafeGetTensorImpl()->set_wrapped_number(true);
  return as;
}

// -- Random numbers -------------------------------------------------------------------------------

// A kernel that draws random numbers has a generator of its own, with a seed that the host draws
// when it launches it: so kernels may run late, and equal seeds of the host give equal numbers.
at::Generator drawn_generator(at::Generator host) {
  std::lock_guard<std::mutex> lock(host.mutex());
  return at::detail::createCPUGenerator(at::check_generator<at::CPUGeneratorImpl>(host)->random64());
}

// False: the operator takes no generator, so it must run with the host's.
bool give_generator(const c10::FunctionSchema& schema, Stack& arguments) {
  static const auto kind = c10::OptionalType::create(c10::GeneratorType::get());
  for (size_t n = 0; n < arguments.size(); ++n)
    if (*schema.arguments()[n].type() == *kind) {
      bool given = arguments[n].isGenerator();
      arguments[n] = drawn_generator(given ? arguments[n].toGenerator() : at::detail::getDefaultCPUGenerator());
      return true;
    }
  return false;
}

// -- Operators that the host waits for ------------------------------------------------------------

void fill_after_wait(const at::Tensor& tensor, const at::Tensor& content, Stream& stream) {
  stream.synchronize();  // the poison of fresh memory must not come later
  if (tensor.numel()) on_host(tensor).copy_(content);
}

void run_now(const c10::OperatorHandle& op, Stack arguments, Stack* results, Stream& stream) {
  count(Count::operations_that_waited);
  const auto& schema = op.schema();
  c10::Device on = device(stream.device);
  stream.synchronize();
  std::vector<std::pair<at::Tensor, at::Tensor>> empty_ones;  // which the operator may resize
  Stack host = convert(arguments, at::kCPU, [&](const at::Tensor& tensor) {
    if (!is_lag(tensor)) return tensor;
    if (tensor.numel()) return on_host(tensor);
    empty_ones.emplace_back(tensor, empty_like_on(tensor, at::kCPU));
    return empty_ones.back().second;
  });
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&host);
  }
  for (auto& [tensor, result] : empty_ones)
    if (result.numel()) {
      resize(tensor, result.sizes(), result.strides());
      fill_after_wait(tensor, result, stream);
    }
  for (size_t n = 0; n < schema.returns().size(); ++n) {
    if (const auto* alias = schema.returns()[n].alias_info()) {
      results->push_back(argument_of(schema, *alias, arguments));
      continue;
    }
    results->push_back(each_tensor(host[n], [&](const at::Tensor& result) {
      at::Tensor tensor = empty_like_on(result, on);
      fill_after_wait(tensor, result, stream);
      return tensor;
    }));
  }
}

// -- Operators that are queued --------------------------------------------------------------------

// Operators of which Meta kernels say nothing, or what a GPU would give: other statistics than a CPU's.
struct WithoutMeta {
  std::mutex mutex;
  std::set<std::string> names{"aten::native_batch_norm",
                              "aten::_native_batch_norm_legit",
                              "aten::_native_batch_norm_legit.no_stats",
                              "aten::_batch_norm_with_update",
                              "aten::_embedding_bag",
                              "aten::_embedding_bag_forward_only"};
  bool has(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex);
    return names.count(name);
  }
  void add(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex);
    names.insert(name);
  }
};

// The results as meta tensors, and arguments named `out` resized to them. False: nobody knows.
bool find_sizes(const c10::OperatorHandle& op, const Stack& arguments, bool is_out, Stack& shapes) {
  static auto& without_meta = *new WithoutMeta;
  std::string name = toString(op.operator_name());
  if (without_meta.has(name)) return false;
  std::vector<std::pair<at::Tensor, at::Tensor>> made;
  shapes = convert(arguments, at::kMeta, [&](const at::Tensor& tensor) {
    if (!is_lag(tensor) && tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    made.emplace_back(tensor, empty_like_on(tensor, at::kMeta));
    return made.back().second;
  });
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&shapes);
  } catch (const c10::NotImplementedError&) {
    without_meta.add(name);
    return false;
  } catch (...) {
    return false;  // the CPU's kernel says what is wrong, if anything is
  }
  if (is_out)
    for (auto& [tensor, meta] : made)
      if (is_lag(tensor) && tensor.sizes() != meta.sizes()) resize(tensor, meta.sizes(), meta.strides());
  // Meta kernels answer as a GPU would: a CPU keeps the statistics in the parameters' type.
  if (op.operator_name().name == "aten::native_layer_norm" && !is_out) {
    bool has_weight = arguments[2].isTensor() && arguments[2].toTensor().defined();
    auto dtype = arguments[has_weight ? 2 : 0].toTensor().scalar_type();
    for (size_t n : {1, 2}) shapes[n] = shapes[n].toTensor().to(dtype);
  }
  return true;
}

using Places = std::vector<std::pair<size_t, std::vector<at::Tensor>>>;  // by the result's position

void fill(const c10::OperatorHandle& op, Places& places, const Stack& results) {
  for (auto& [n, targets] : places) {
    size_t next = 0;
    each_tensor(results.at(n), [&](const at::Tensor& result) {
      const at::Tensor& target = targets.at(next++);
      TORCH_CHECK(result.sizes() == target.sizes() && result.dtype() == target.dtype(), "lag: ", op.operator_name(),
                  " made ", result.dtype(), result.sizes(), ", not ", target.dtype(), target.sizes());
      target.copy_(result);
      return result;
    });
    TORCH_CHECK(next == targets.size(), "lag: ", op.operator_name(), " made less than it was to make");
  }
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Stack arguments(stack->end() - schema.arguments().size(), stack->end());
  torch::jit::drop(*stack, arguments.size());
  c10::Device on = device_of_call(arguments);
  c10::DeviceGuard guard(on);
  Stream& stream = current_stream(on.index());

  bool needs_sizes = false, only_tensors = true, is_out = false;
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "lag: ", op.operator_name(), " gives a view, and is not covered");
    bool is_tensor = result.type()->kind() == c10::TypeKind::TensorType;
    only_tensors = only_tensors && (is_tensor || *result.type() == *c10::ListType::ofTensors());
    needs_sizes = needs_sizes || !alias;
  }
  for (size_t n = 0; n < arguments.size(); ++n)
    if (schema.arguments()[n].kwarg_only() && writes(schema.arguments()[n])) {
      is_out = true;
      each_tensor(arguments[n], [&](const at::Tensor& tensor) {
        needs_sizes = needs_sizes || !tensor.numel();
        return tensor;
      });
    }
  if (!only_tensors || (op.hasTag(at::Tag::nondeterministic_seeded) && !give_generator(schema, arguments)))
    return run_now(op, std::move(arguments), stack, stream);
  Stack shapes;
  if (needs_sizes && !find_sizes(op, arguments, is_out, shapes))
    return run_now(op, std::move(arguments), stack, stream);

  Places places;
  for (size_t n = 0; n < schema.returns().size(); ++n) {
    if (const auto* alias = schema.returns()[n].alias_info()) {
      stack->push_back(argument_of(schema, *alias, arguments));
      continue;
    }
    std::vector<at::Tensor> targets;
    stack->push_back(each_tensor(shapes[n], [&](const at::Tensor& meta) {
      at::Tensor tensor = empty_like_on(meta, on);
      targets.push_back(on_host(tensor));
      return tensor;
    }));
    places.emplace_back(n, std::move(targets));
  }
  Stack host = convert(arguments, at::kCPU, [&](const at::Tensor& tensor) {
    return is_lag(tensor) ? on_host(tensor) : from_host_for_kernel(tensor, op);
  });
  count(Count::kernels);
  launch(stream, Kind::kernel, [op, host = std::move(host), places = std::move(places)]() mutable {
    op.callBoxed(&host);
    fill(op, places, host);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Else torch would compute these another way than on a CPU, or not at all.
  for (const char* name :
       {"native_layer_norm", "native_layer_norm.out", "native_group_norm", "silu_backward", "mish_backward",
        "mse_loss", "smooth_l1_loss", "convolution", "convolution_backward", "conj_physical_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace lag
