// What autograd and FakeTensorMode need of CUDA in a torch built without it; it computes nothing.
//
// A guard that switches no device, hooks that find one device, and CUDA as the accelerator. The
// functions of `accelerator` replace those of torch, so this library must be loaded before torch.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>)

namespace at {

struct FakeHooks final : CUDAHooksInterface {
  explicit FakeHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
using CUDAHooks = FakeHooks;  // the name that torch looks up
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
bool isAccelerator(c10::DeviceType type) {
  return type == c10::DeviceType::CUDA;
}
}  // namespace accelerator

}  // namespace at
