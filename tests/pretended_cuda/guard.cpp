// What torch asks of a CUDA build before it takes a tensor for one of cuda:0, answered without a GPU: one device, streams
// that are always idle, pinned memory that is ordinary memory whose addresses are remembered, random generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <map>
#include <mutex>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);
const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return STREAM; }
  c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return STREAM; }
  c10::Stream getNewStream(c10::Device, int) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const override { return STREAM; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Host memory whose addresses are remembered, so that is_pinned() answers as it would.
struct PinnedMemory final : public c10::Allocator {
  static std::map<uintptr_t, size_t>& blocks() {
    static auto* all = new std::map<uintptr_t, size_t>();  // outlives every tensor
    return *all;
  }
  static std::mutex& lock() {
    static auto* mutex = new std::mutex();
    return *mutex;
  }
  static void release(void* pointer) {
    {
      const std::lock_guard<std::mutex> held(lock());
      blocks().erase(reinterpret_cast<uintptr_t>(pointer));
    }
    c10::free_cpu(pointer);
  }
  static bool holds(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const std::lock_guard<std::mutex> held(lock());
    auto next = blocks().upper_bound(address);
    return next != blocks().begin() && address < (--next)->first + next->second;
  }
  c10::DataPtr allocate(size_t size) override {
    void* pointer = c10::alloc_cpu(size);
    if (pointer != nullptr) {
      const std::lock_guard<std::mutex> held(lock());
      blocks()[reinterpret_cast<uintptr_t>(pointer)] = size;
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

// The CPU's generator under another device: kernels on the CPU refuse it, as CUDA's refuse the CPU's.
struct Generator final : public at::CPUGeneratorImpl {
  Generator() {
    device_ = DEVICE;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  void deviceSynchronize(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedMemory();
    return allocator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* generator = new at::Generator(at::make_generator<Generator>());
    return *generator;
  }
};

}  // namespace

namespace at {
namespace {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
}  // namespace at
