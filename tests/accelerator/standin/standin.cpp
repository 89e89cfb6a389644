// A device with real numbers and no hardware: its memory is the host's, its kernels are those of the CPU.
//
// What a GPU refuses is refused: a CPU tensor among tensors of the device, and, in deterministic mode,
// operations without a deterministic CUDA kernel. Reads by the host and bytes in use are counted.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> num_host_reads{0};

// Memory

std::atomic<int64_t> num_bytes_in_use{0};
std::atomic<int64_t> peak_bytes{0};

void release(void* data) {
  num_bytes_in_use -= static_cast<int64_t>(malloc_usable_size(data));
  std::free(data);
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = num_bytes == 0 ? nullptr : std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    num_bytes_in_use += static_cast<int64_t>(malloc_usable_size(data));
    peak_bytes = std::max(peak_bytes.load(), num_bytes_in_use.load());
    return {data, data, &release, c10::Device(DEVICE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

HostMemory memory;
REGISTER_ALLOCATOR(DEVICE, &memory)
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::FakeGuardImpl<DEVICE>)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = memory.allocate(num_bytes);
    std::memcpy(grown.get(), storage.data(), std::min(num_bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(num_bytes);
  }
};

// A CPU tensor over the same memory

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.device().type() != DEVICE) return tensor;
  auto base = at::from_blob(
      tensor.storage().mutable_data(),
      {static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size())},
      tensor.options().device(at::kCPU));
  return base.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// Operations that a device must have

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (from.device().type() == DEVICE && to.device().is_cpu()) ++num_host_reads;
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());  // a view keeps its strides
  return copy_from(from, to, false);
}

at::Scalar read(const at::Tensor& tensor) {
  ++num_host_reads;
  return as_cpu(tensor).item();
}

at::Tensor& set_storage(
    at::Tensor& result, at::Storage storage, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(result, storage, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& result, at::Storage storage) {
  const int64_t count = storage.nbytes() / result.element_size();
  return set_storage(result, storage, 0, {count}, {1});
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  int64_t count = 1;
  for (auto one : sizes) count *= one;
  const size_t needed = (count + self.storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

// All other operations: on the CPU, after the checks of a GPU

const std::set<std::string> TAKES_CPU_INDICES = {
    "aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::index.Tensor_out"};
const std::set<std::string> READS_BY_ADDRESS = {"aten::_fused_adamw_", "aten::_fused_adam_"};
// torch.use_deterministic_algorithms: "will throw a RuntimeError"
const std::set<std::string> NOT_DETERMINISTIC = {
    "aten::cumsum", "aten::cumsum_", "aten::cumsum.out", "aten::histc", "aten::kthvalue", "aten::put_"};

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.schema().operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void check_devices(const std::string& name, const std::vector<at::Tensor>& tensors) {
  bool on_device = false;
  for (const auto& one : tensors) on_device |= one.defined() && one.device().type() == DEVICE;
  if (!on_device) return;
  const size_t last = TAKES_CPU_INDICES.count(name) ? 1 : tensors.size();
  for (size_t i = 0; i < last; ++i) {
    const auto& one = tensors[i];
    const bool is_number = one.defined() && one.dim() == 0 && !READS_BY_ADDRESS.count(name);
    TORCH_CHECK(
        !one.defined() || one.device().type() == DEVICE || is_number,
        "Expected all tensors to be on the same device: ", name, " has a tensor on ", one.device(),
        " of shape ", one.sizes(), " among those of the device");
  }
  TORCH_CHECK(
      !(at::globalContext().deterministicAlgorithms() && NOT_DETERMINISTIC.count(name) &&
        tensors[0].is_floating_point()),
      name, " does not have a deterministic implementation on CUDA");
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = name_of(op);
  std::vector<at::Tensor> tensors;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorList()) tensors.push_back(one);
    } else if (value.isOptionalTensorList()) {
      for (std::optional<at::Tensor> one : value.toOptionalTensorList()) {
        if (one.has_value()) tensors.push_back(*one);
      }
    }
  }
  check_devices(name, tensors);
  const auto before = num_host_reads.load();
  at::native::cpu_fallback(op, stack);
  num_host_reads = before;  // the copies of the fallback are no reads
  if (name == "aten::nonzero" || name == "aten::_unique2" || name == "aten::masked_select") {
    ++num_host_reads;  // the host must know the size of the result
  }
}

// The fused attention of the CPU where the CPU would take it; standin_backend.py has its kernels.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
    std::optional<double> scale, bool enable_gqa) {
  const auto mask_on_cpu =
      mask.has_value() ? std::optional<at::Tensor>(as_cpu(*mask)) : std::nullopt;
  const auto chosen = at::_fused_sdp_choice(
      as_cpu(query), as_cpu(key), as_cpu(value), mask_on_cpu, dropout, is_causal, scale, enable_gqa);
  const auto math = static_cast<int64_t>(sdp::SDPBackend::math);
  return chosen == math ? math : static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

extern "C" void standin_register() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

extern "C" int64_t standin_num_host_reads() {
  return num_host_reads.load();
}

extern "C" int64_t standin_peak_bytes() {
  return peak_bytes.load();
}

extern "C" void standin_reset_peak() {
  peak_bytes = num_bytes_in_use.load();
}
