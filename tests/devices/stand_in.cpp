// A device for tests: torch's PrivateUse1 type over ordinary memory. Allocation, copies and views are here; every other
// operation runs on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

namespace {
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(TYPE, 0);

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* data = bytes ? c10::GetCPUAllocator()->raw_allocate(bytes) : nullptr;
        return {data, data, &release, DEVICE};
    }
    static void release(void* data) {
        if (data) c10::GetCPUAllocator()->raw_deallocate(data);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
} allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
    c10::Device getDevice() const override { return DEVICE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
    c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
} hooks;

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& x) {
    if (x.device().type() != TYPE) return x;
    return at::from_blob(x.numel() ? x.data_ptr() : nullptr, x.sizes(), x.strides(), x.options().device(at::kCPU));
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
    auto host = on_host(target);
    host.copy_(on_host(source));
    return target;
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    if (target.sizes() != source.sizes()) target.resize_(source.sizes());
    return copy_from(source, target, false);
}
at::Scalar item(const at::Tensor& x) { return on_host(x).item(); }
const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    at::native::resize_impl_cpu_(x.unsafeGetTensorImpl(), sizes, std::nullopt);
    return x;
}
at::Tensor as_strided(const at::Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
    auto first = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
    return at::cpu::as_strided(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}
at::Tensor view(const at::Tensor& x, c10::SymIntArrayRef size) { return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("resize_", resize);
    m.impl("as_strided", as_strided);
    m.impl("view", view);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

const bool REGISTERED = (at::RegisterPrivateUse1HooksInterface(&hooks), true);
