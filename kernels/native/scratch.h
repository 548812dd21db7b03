// Scratch memory of a thread.
#pragma once

#include <cstdint>
#include <memory>

namespace vlm {

// A cache-aligned buffer that a thread reuses from call to call.
class ScratchBuffer {
  public:
    // Returns at least `count` floats, uninitialised.
    float* get(int64_t count) {
        const int64_t lines = (count + 16 - 1) / 16;
        if (lines > lines_) {
            lines_ = 0;
            memory_.reset(new Line[lines]);
            lines_ = lines;
        }
        return (float*)memory_.get();
    }

  private:
    struct alignas(64) Line {
        float values[16];
    };
    std::unique_ptr<Line[]> memory_;
    int64_t lines_ = 0;
};

}  // namespace vlm
