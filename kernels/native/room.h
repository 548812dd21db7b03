// Memory that a thread keeps.
#pragma once

#include <cstdint>
#include <memory>

namespace vlm {

// Memory of one thread that is kept from call to call, aligned to a cache line.
class Room {
  public:
    // At least `count` floats, with whatever they hold.
    float* of(int64_t count) {
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
