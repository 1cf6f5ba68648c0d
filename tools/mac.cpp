// A Mac's GPU that is not there, for tools/mac.py: its tensors lie in the host's memory, and its operations are the CPU's. An operation
// that such a GPU lacks, a tensor of float64 and an operation on tensors of two devices raise as they would there.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sstream>
#include <set>

namespace {

const c10::Device MAC(c10::DeviceType::MPS, 0);
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS> {
  c10::Device getDevice() const override { return MAC; }
  c10::Device exchangeDevice(c10::Device) const override { return MAC; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, MAC); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(MPS, Guard);

struct MPSHooks : at::MPSHooksInterface {
  MPSHooks() = default;
  explicit MPSHooks(at::MPSHooksArgs) {}
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
} // namespace
namespace at {
REGISTER_MPS_HOOKS(MPSHooks);
}
namespace {

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = c10::GetCPUAllocator()->raw_allocate(n);
    return {p, p, &Memory::release, MAC};
  }
  static void release(void* p) { c10::GetCPUAllocator()->raw_deallocate(p); }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::MPS, &memory);

void narrow(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble && dtype != at::kComplexDouble, "Apple's GPUs have no float64");
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto of = c10::dtype_or_default(dtype);
  narrow(of);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::MPS), of, format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto of = c10::dtype_or_default(dtype);
  narrow(of);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::MPS), of);
}

at::Tensor here(const at::Tensor& x) { // the same memory, as a tensor of the CPU
  return x.device() == MAC ? at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU)) : x;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
  here(self).copy_(here(from));
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  here(to).copy_(here(self));
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) resize_(to, c10::fromIntArrayRefSlow(self.sizes()), std::nullopt);
  here(to).copy_(here(self));
  return to;
}

at::Scalar scalar(const at::Tensor& self) { return here(self).item(); }

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> at) {
  std::optional<int64_t> offset;
  if (at) offset = at->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor& set(at::Tensor& self, at::Storage from, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  at::native::checkSetStorage(self, from, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

const std::set<std::string>& known() {
  static const std::set<std::string> names = [] {
    std::set<std::string> found;
    std::istringstream file(std::getenv("LM_MAC_KERNELS"));
    for (std::string line; std::getline(file, line);) found.insert(line);
    return found;
  }();
  return names;
}

void elsewhere(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.operator_name();
  const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  TORCH_CHECK_NOT_IMPLEMENTED(full.rfind("aten::", 0) != 0 || known().count(full.substr(6)), full, " has no kernel for Apple's GPUs");
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>()); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("_local_scalar_dense", scalar);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("set_.source_Storage_storage_offset", set);
}

} // namespace
