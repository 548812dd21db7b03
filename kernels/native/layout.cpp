// The layout of everything that Python mirrors, as text.
#include "layout.h"

#include <string>

namespace vlm {

// Made at its first use: other files' objects may be constructed before this file's would be.
static std::string& layout() {
    static std::string text;
    return text;
}

Mirrored::Mirrored(const char* name, size_t size, std::initializer_list<Field> fields) {
    std::string& text = layout();
    text += std::string("struct ") + name + ' ' + std::to_string(size);
    for (const Field& field : fields)
        text += std::string(" ") + field.name + ' ' + std::to_string(field.offset) + ' ' +
                std::to_string(field.size);
    text += '\n';
}

Mirrored::Mirrored(const char* name, int64_t value) {
    layout() += std::string("constant ") + name + ' ' + std::to_string(value) + '\n';
}

}  // namespace vlm

extern "C" const char* vlm_layout() { return vlm::layout().c_str(); }
