// What a build of torch for CPUs lacks to run autograd on fake CUDA tensors: a device, whose calls do nothing.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace {
using c10::Device;
using c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(c10::DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const override { return getStream(getDevice()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

Guard guard;
Hooks hooks;
const c10::impl::DeviceGuardImplInterface* other_guard = &guard;
}  // namespace

// Puts the two in the places of torch's own, or, called again, those back.
extern "C" void exchange_device() {
  auto& place = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  other_guard = place.exchange(other_guard);
  // torch asks for its hooks once, and keeps them: an object with nothing but a table of functions.
  auto* own = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::swap(*reinterpret_cast<void**>(own), *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&hooks)));
}
