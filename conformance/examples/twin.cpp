// A device with two indices: torch's PrivateUse1 under the name "twin", memory on the host, a few kernels of its own,
// torch's CPU kernels for the rest. Built on the spot by twin.py.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>

namespace {

constexpr auto kTwin = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kCount = 2;
thread_local c10::DeviceIndex current = 0;
std::string fault;  // what is broken on purpose

bool broken(const char* word) { return fault == word; }

// --- memory ---------------------------------------------------------------------------------------------------------

void release(void* memory) { std::free(memory); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::calloc(bytes, 1) : nullptr;
    return {memory, memory, &release, c10::Device(kTwin, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};
Allocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kTwin; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = current;
    current = to.index();
    return {kTwin, before};
  }
  c10::Device getDevice() const override { return {kTwin, current}; }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() >= 0 && to.index() < kCount, "twin has no device ", int(to.index()));
    current = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::Stream getStream(c10::Device on) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, on); }
  c10::Stream getDefaultStream(c10::Device on) const override { return c10::Stream(c10::Stream::DEFAULT, on); }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, to.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return broken("count-lies") ? 4 : kCount; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto before = current;
    current = storage.device().index();
    auto fresh = allocator.allocate(bytes);
    current = before;
    auto kept = std::min(bytes, storage.nbytes());
    if (kept) std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  c10::DeviceIndex deviceCount() const override { return broken("count-lies") ? 4 : kCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
};

c10::Device placed(std::optional<c10::Device> asked) {
  auto index = asked && asked->has_index() ? asked->index() : current;
  TORCH_CHECK(index < (broken("count-lies") ? 1 : kCount), "twin has no device ", int(index));
  return {kTwin, index};
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A CPU tensor over the memory of one of ours.
at::Tensor seen(const at::Tensor& t, bool faulty = false) {
  if (!t.device().is_privateuseone()) return t;
  auto size = t.sizes().vec(), stride = t.strides().vec();
  auto offset = t.storage_offset();
  auto room = int64_t(t.storage().nbytes() / t.itemsize());
  if (faulty && broken("strides-ignored") && t.numel() <= room - offset)
    stride = at::empty(size, at::TensorOptions().device(at::kMeta)).strides().vec();
  if (faulty && broken("offset-ignored")) offset = 0;
  auto* base = static_cast<char*>(t.storage().mutable_data());
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (!t.numel()) return at::empty_strided(size, stride, options);
  auto alias = at::from_blob(base + offset * t.itemsize(), size, stride, options);
  alias._set_conj(t.is_conj());
  alias._set_neg(t.is_neg());
  return alias;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  seen(target).copy_(seen(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_output(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& t) { return seen(t).item(); }

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (t.sizes() == sizes) return t;  // keeps the strides of a view
  auto* impl = t.unsafeGetTensorImpl();
  auto bytes = (c10::multiply_integers(sizes) + t.storage_offset()) * t.itemsize();
  if (t.storage().nbytes() < bytes)
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
  impl->set_sizes_contiguous(sizes);
  return t;
}

at::Tensor efficient_zeros(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>) {
  return empty(C10_AS_INTARRAYREF_SLOW(size), dtype, {}, device, {}, {}).zero_();
}

// --- views: torch's own code for the CPU, which looks at sizes and strides alone --------------------------------------

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto at = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(t, dim, size, step);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(t, storage, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_whole(at::Tensor& t, at::Storage storage) {
  return at::native::set_storage_cpu_(t, storage, 0, {int64_t(storage.nbytes() / t.itemsize())}, {});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) { return at::native::set_tensor_(t, source); }

// --- kernels ----------------------------------------------------------------------------------------------------------

void same_device(const at::Tensor& a, const at::Tensor& b) {
  bool scalar = (a.is_cpu() && !a.dim()) || (b.is_cpu() && !b.dim());
  TORCH_CHECK(scalar || a.device() == b.device(), "Expected all tensors to be on the same device, but found ",
              a.device(), " and ", b.device());
}

at::Tensor mul(const at::Tensor& a, const at::Tensor& b) {
  same_device(a, b);
  if (broken("empty-refused")) TORCH_CHECK(a.numel() && b.numel(), "cannot launch a kernel with 0 threads");
  auto dtype = at::result_type(a, b);
  auto device = a.is_cpu() ? b.device() : a.device();
  if (broken("wrong-index")) device = c10::Device(kTwin, 0);
  auto size = at::infer_size(a.sizes(), b.sizes());
  auto result = seen(a, true).mul(seen(b, true));
  auto made = at::empty_strided(size, result.strides(), at::TensorOptions().dtype(dtype).device(device));
  if (made.numel()) seen(made).copy_(result);
  return made;
}

at::Tensor negative(const at::Tensor& a) {
  auto result = seen(a).neg();
  auto made = at::empty_strided(a.sizes(), result.strides(), a.options());
  if (made.numel()) seen(made).copy_(result);
  return made;
}

at::Tensor to_twin(const at::Tensor& t, c10::Device device) {
  if (!t.defined()) return t;
  auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
  if (made.numel()) seen(made).copy_(t);
  return made;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  std::optional<at::Tensor> b;
  if (bias && bias->defined()) b = seen(*bias);
  return to_twin(at::convolution_symint(seen(input), seen(weight), b, stride, padding, dilation, transposed,
                                        output_padding, groups),
                 input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  std::vector<c10::SymInt> bias{grad.sym_size(1)};
  auto [a, b, c] = at::convolution_backward_symint(seen(grad), seen(input), seen(weight), c10::SymIntArrayRef(bias),
                                                   stride, padding, dilation, transposed, output_padding, groups, mask);
  return {to_twin(a, input.device()), to_twin(b, input.device()), to_twin(c, input.device())};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<at::Device> first;
  bool indexing = op.schema().name().find("index") != std::string::npos;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || indexing) continue;
    const auto& t = value.toTensor();
    if (!t.defined() || (t.is_cpu() && !t.dim())) continue;
    TORCH_CHECK(!first || *first == t.device(), "Expected all tensors to be on the same device, but found ", *first,
                " and ", t.device());
    first = t.device();
  }
  at::native::cpu_fallback(op, stack, true);
}

void set_fault(const std::string& word) { fault = word; }

}  // namespace

int64_t count() { return broken("count-lies") ? 4 : kCount; }

TORCH_LIBRARY(twin, m) {
  m.def("set_fault(str word) -> ()", &set_fault);
  m.def("device_count() -> int", &count);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("mul.Tensor", mul);
  m.impl("neg", negative);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Else a copy of a conjugated view asks for a copy of itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

static bool ready = [] {
  c10::SetAllocator(kTwin, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
