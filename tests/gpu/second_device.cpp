// A second device in the memory of the CPU, whose kernels are the CPU's, and which refuses tensors of both devices in
// one operation as CUDA does: faults of device can be found without a GPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_as_real_cpu_dispatch.h>
#include <ATen/ops/view_as_complex_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>
#include <unordered_set>

namespace {

constexpr auto Second = c10::DeviceType::PrivateUse1;
const c10::Device device(Second, 0);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    return {data, data, &c10::free_cpu, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
} memory;

// All runs at once: events and streams are nothing.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<Second> {
  c10::Device getDevice() const override { return device; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(device); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator() : CPUGeneratorImpl() { device_ = c10::Device(Second, 0); }
  void set_device(c10::Device other) { device_ = other; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    if (storage.data() && size) memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
} hooks;

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to.resolve_conj()).copy_(on_cpu(from.resolve_conj()));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void same(at::TensorList tensors) {
  for (const auto& one : tensors) TORCH_CHECK(!one.defined() || one.device() == device, "expected all tensors to be on ", device, ", but found one on cpu");
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  same({input, weight, bias.value_or(at::Tensor())});
  const auto on = [](const at::Tensor& tensor) { return tensor.cpu(); };
  return at::convolution(on(input), on(weight), bias && bias->defined() ? std::make_optional(on(*bias)) : std::nullopt, stride, padding,
                         dilation, transposed, output_padding, groups).to(device);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  same({grad, input, weight});
  const int64_t rows = grad.size(1);
  auto [a, b, c] = at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), at::IntArrayRef{rows}, stride, padding, dilation,
                                            transposed, output_padding, groups, mask);
  const auto back = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(device) : tensor; };
  return {back(a), back(b), back(c)};
}

// Its schema does not say that it changes the running statistics: the fallback would change copies.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& var, bool training, double momentum, double eps) {
  const auto on = [](const std::optional<at::Tensor>& tensor) {
    if (!tensor || !tensor->defined()) return std::optional<at::Tensor>();
    same({*tensor});
    return std::make_optional(on_cpu(*tensor));
  };
  auto [a, b, c] = at::native_batch_norm(*on(input), on(weight), on(bias), on(mean), on(var), training, momentum, eps);
  return {a.to(device), b.to(device), c.to(device)};
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef symbolic, std::optional<c10::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size && !format) return self;
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // CUDA indexes by indices of the CPU, and concatenates no number of it.
  static const std::unordered_set<std::string> indexes{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  const auto& name = op.schema().name();
  const bool strict = name == "aten::cat" || name == "aten::_foreach_copy_";
  const int64_t count = op.schema().arguments().size();
  const at::Tensor *here = nullptr, *there = nullptr;
  Generator* source = nullptr;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device() == device) here = &tensor;
    else if (strict || tensor.dim() || name == "aten::index_select" || name == "aten::gather") there = &tensor;
  };
  for (const auto& value : torch::jit::last(*stack, count)) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList() && !indexes.count(name)) for (const at::Tensor& one : value.toTensorList()) see(one);
    else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device() == device, name, ": expected a generator on ", device);
      source = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
    }
  }
  TORCH_CHECK(!(here && there), name, ": expected all tensors to be on the same device, but found ", device, " and cpu");
  if (source) source->set_device(at::kCPU);
  at::native::cpu_fallback(op, stack);
  if (source) source->set_device(device);
}

const bool registered = [] {
  at::SetAllocator(Second, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", at::cpu::as_strided);
  m.impl("view", at::cpu::view);
  m.impl("_reshape_alias", at::cpu::_reshape_alias);
  m.impl("unfold", at::cpu::unfold);
  m.impl("view_as_real", at::cpu::view_as_real);
  m.impl("view_as_complex", at::cpu::view_as_complex);
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return self.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides()); });
  m.impl("set_.source_Storage", [](at::Tensor& self, c10::Storage s) -> at::Tensor& {
    const int64_t count = s.nbytes() / self.itemsize();
    return at::cpu::set_(self, std::move(s), 0, {count}, {}); });
  m.impl("set_.source_Storage_storage_offset", [](at::Tensor& self, c10::Storage s, int64_t o, at::IntArrayRef n, at::IntArrayRef t) -> at::Tensor& {
    return at::cpu::set_(self, std::move(s), o, n, t); });
  m.impl("resize_", resize);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("is_pinned", [](const at::Tensor&, std::optional<c10::Device>) { return false; });
}
