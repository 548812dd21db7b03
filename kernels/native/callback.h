// References to functions, for calls across translation units.
#pragma once

namespace vlm {

// A reference to `work`, which must outlive it.
template <typename... Arguments>
class Callback {
  public:
    template <typename Work>
    Callback(const Work& work)
        : work_(&work), call_([](const void* own, Arguments... arguments) {
              (*(const Work*)own)(arguments...);
          }) {}

    void operator()(Arguments... arguments) const { call_(work_, arguments...); }

  private:
    const void* work_;
    void (*call_)(const void*, Arguments...);
};

}  // namespace vlm
