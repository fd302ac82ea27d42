// Grey and smaller images, with the numbers of `grey` and `resized` in images.py.

#include <algorithm>
#include <cstddef>
#include <cstdint>

// Each of `size` results is a weighted sum of `terms` numbers, in 256ths.
struct Sums {
    int64_t size, terms;
    const int64_t* index;    // (terms, size)
    const uint16_t* weight;  // (terms, size)
};

namespace {

inline void grey_row(const uint8_t* pixel, int64_t width, ptrdiff_t next, ptrdiff_t channel, uint8_t* out) {
    for (int64_t x = 0; x < width; x++, pixel += next)
        out[x] = (77 * pixel[0] + 150 * pixel[channel] + 29 * pixel[2 * channel]) >> 8;
}

}  // namespace

// Write an image (height, width, channels) to `out` (rows.size, columns.size); three channels become grey. `strides` are those of
// rows, columns and channels in bytes; `scratch` has room for (height + 3) * width bytes and is aligned to two.
extern "C" void shrink(const uint8_t* image, int64_t height, int64_t width, int64_t channels, const int64_t* strides,
                       const Sums* rows, const Sums* columns, uint8_t* scratch, uint8_t* out) {
    auto* sums = reinterpret_cast<uint16_t*>(scratch);
    uint8_t *line = scratch + 2 * width, *grey = scratch + 3 * width;
    ptrdiff_t next = strides[1], channel = strides[2];
    for (int64_t y = 0; y < height; y++) {
        const uint8_t* pixel = image + y * strides[0];
        uint8_t* row = grey + y * width;
        if (channels == 3 && next == 4 && channel == -1)  // words 0x00RRGGBB; with known strides, many pixels at once
            grey_row(pixel, width, 4, -1, row);
        else if (channels == 3)
            grey_row(pixel, width, next, channel, row);
        else
            for (int64_t x = 0; x < width; x++, pixel += next) row[x] = *pixel;
    }
    for (int64_t y = 0; y < rows->size; y++) {
        std::fill_n(sums, width, uint16_t(128));  // one half: rounds to the nearest
        for (int64_t term = 0; term < rows->terms; term++) {
            uint16_t weight = rows->weight[term * rows->size + y];
            const uint8_t* row = grey + rows->index[term * rows->size + y] * width;
            if (weight)
                for (int64_t x = 0; x < width; x++) sums[x] += weight * row[x];
        }
        for (int64_t x = 0; x < width; x++) line[x] = sums[x] >> 8;
        for (int64_t x = 0; x < columns->size; x++) {
            uint16_t sum = 128;
            for (int64_t term = 0; term < columns->terms; term++)
                sum += columns->weight[term * columns->size + x] * line[columns->index[term * columns->size + x]];
            *out++ = sum >> 8;
        }
    }
}
