// CUDA as far as shapes, dtypes and devices go, for a CPU build of torch: enough for autograd over fake tensors.
//
// Under torch's FakeTensorMode an operation computes what its result looks like, and no values. Forward runs over
// device="cuda" on a CPU build as it stands. Backward does not: the engine asks the device's guard for a stream, and
// torch's core asks CUDA's hooks if there is a device. Both are registered here. They name one GPU, number 0, with one
// stream, and do nothing.
//
// conftest.py builds this file, and loads it before torch is imported: torch asks for the hooks once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct OneGpuGuard final : public c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::Device getDevice() const override { return c10::Device(kCuda, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kCuda, 0));
  }
};

struct OneGpuHooks final : public at::CUDAHooksInterface {
  explicit OneGpuHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

const c10::impl::DeviceGuardImplRegistrar registered(kCuda, new OneGpuGuard());

} // namespace

namespace at {
using OneGpuHooks = ::OneGpuHooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", OneGpuHooks)
} // namespace at
