// An emulator of the NES for cartridges without a mapper (NROM), such as Super Mario Bros. It offers the functions of nes-py's
// library and plays that game frame by frame as nes-py does, also where nes-py differs from the console: memory and screen are
// equal, so that an agent trained with either plays the same games with the other. Unlike nes-py it does nothing for codes that
// are no instructions, and there are no colours beyond the 64 known ones.
//
// - The picture unit runs only when the processor could notice: before one of its registers is accessed, and up to the vertical
//   blank, which interrupts the processor. It then draws whole rows of tiles instead of single pixels.
// - A processor that waits in a jump to itself, as games do until the next frame, is not executed.
// - A frame may be played without being drawn. If its picture is asked for all the same, the frame is played again.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

namespace {

using Byte = uint8_t;
using Address = uint16_t;
using Pixel = uint32_t;

constexpr int WIDTH = 256, HEIGHT = 240;
constexpr int CYCLES = 29781;       // of the processor in a frame; the picture unit makes three dots in each
constexpr int DOTS = 341;           // of a line; the first WIDTH are visible
constexpr int BLANK_LINE = 241, LAST_LINE = 260;
constexpr Address NMI = 0xfffa, RESET = 0xfffc, BRK = 0xfffe;

// The processor's flags, in the order in which nes-py pushes them: from the lowest bit, not from the highest.
enum Flag : Byte { NEGATIVE = 1, OVERFLOW = 2, BREAK = 16, NO_INTERRUPT = 32, ZERO = 64, CARRY = 128 };
constexpr Byte DECIMAL = 16, FLAGS_AT_RESET = 0x34;

// Cycles of each instruction; 0: not an instruction.
constexpr Byte INSTRUCTION_CYCLES[256] = {
    7, 6, 0, 0, 0, 3, 5, 0, 3, 2, 2, 0, 0, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    6, 6, 0, 0, 3, 3, 5, 0, 4, 2, 2, 0, 4, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    6, 6, 0, 0, 0, 3, 5, 0, 3, 2, 2, 0, 3, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    6, 6, 0, 0, 0, 3, 5, 0, 4, 2, 2, 0, 5, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    0, 6, 0, 0, 3, 3, 3, 0, 2, 0, 2, 0, 4, 4, 4, 0, 2, 6, 0, 0, 4, 4, 4, 0, 2, 5, 2, 0, 0, 5, 0, 0,
    2, 6, 2, 0, 3, 3, 3, 0, 2, 2, 2, 0, 4, 4, 4, 0, 2, 5, 0, 0, 4, 4, 4, 0, 2, 4, 2, 0, 4, 4, 4, 0,
    2, 6, 0, 0, 3, 3, 5, 0, 2, 2, 2, 0, 4, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
    2, 6, 0, 0, 3, 3, 5, 0, 2, 2, 2, 0, 4, 4, 6, 0, 2, 5, 0, 0, 0, 4, 6, 0, 2, 4, 0, 0, 0, 4, 7, 0,
};

// The colours of nes-py (MIT licence), RGB.
constexpr Pixel COLOURS[64] = {
    0x7C7C7C, 0x0000FC, 0x0000BC, 0x4428BC, 0x940084, 0xA80020, 0xA81000, 0x881400,
    0x503000, 0x007800, 0x006800, 0x005800, 0x004058, 0x000000, 0x000000, 0x000000,
    0xBCBCBC, 0x0078F8, 0x0058F8, 0x6844FC, 0xD800CC, 0xE40058, 0xF83800, 0xE45C10,
    0xAC7C00, 0x00B800, 0x00A800, 0x00A844, 0x008888, 0x000000, 0x000000, 0x000000,
    0xF8F8F8, 0x3CBCFC, 0x6888FC, 0x9878F8, 0xF878F8, 0xF85898, 0xF87858, 0xFCA044,
    0xF8B800, 0xB8F818, 0x58D854, 0x58F898, 0x00E8D8, 0x787878, 0x000000, 0x000000,
    0xFCFCFC, 0xA4E4FC, 0xB8B8F8, 0xD8B8F8, 0xF8B8F8, 0xF8A4C0, 0xF0D0B0, 0xFCE0A8,
    0xF8D878, 0xD8F878, 0xB8F8B8, 0xB8F8D8, 0x00FCFC, 0xF8D8F8, 0x000000, 0x000000,
};

// For each byte of a pattern, its eight bits as eight bytes, the leftmost pixel first.
struct Spread {
    uint64_t bits[256];
    constexpr Spread() : bits() {
        for (int byte = 0; byte < 256; byte++)
            for (int pixel = 0; pixel < 8; pixel++) bits[byte] |= uint64_t(byte >> (7 - pixel) & 1) << (8 * pixel);
    }
};
constexpr Spread SPREAD;
constexpr uint64_t EACH_BYTE = 0x0101010101010101;

// The eight colours, 0 to 3, of a row of a tile, a byte each, the leftmost first (on little-endian machines).
inline uint64_t tile_row(Byte low, Byte high) { return SPREAD.bits[low] | SPREAD.bits[high] << 1; }

struct Processor {
    Address counter;
    Byte stack, a, x, y, flags;
    int busy;         // cycles until the next instruction, which begins with the last of them
    uint32_t cycles;  // since the reset
    bool waiting;     // in a jump to itself
};

struct Picture {
    enum Phase { BEFORE, VISIBLE, AFTER, BLANK } phase;
    int dot, line;
    bool even_frame;
    bool blank, hit;  // status: vertical blank; sprite 0 has met the background
    Address address, next_address;  // of video memory; the scroll position while drawing
    Byte fine_x, read_buffer, sprite_address;
    bool first_write;
    bool show_background, show_sprites, hide_left_background, hide_left_sprites;
    bool interrupts, tall_sprites;
    Address background_patterns, sprite_patterns, increment;
    Byte sprites[256];  // four bytes each: line, tile, attributes, column
    Byte on_line[8];    // sprites of the line
    int sprites_on_line;
    Byte memory[2048], palette[32];
    Pixel colours[32];  // of the palette

    bool rendering() const { return show_background && show_sprites; }
};

struct State {
    Byte memory[2048], extended[8192];
    Processor processor;
    Picture picture;
    int owed;  // dots that the picture unit is behind the processor
    int due;   // dots from its position until the vertical blank, at least
};

struct Pad {
    bool strobe = true;
    Byte buttons = 0, bits = 0;
    Byte read() {
        Byte bit = strobe ? buttons & 1 : bits & 1;
        if (!strobe) bits >>= 1;
        return bit | 0x40;
    }
};

// What `Backup` keeps.
struct Moment {
    State now{};
    Pixel screen[HEIGHT][WIDTH] = {};
    bool drawn = true;  // the last frame is on the screen; otherwise that frame began like this:
    State begun{};
    Pad begun_pads[2];
};

class Console : Moment {
   public:
    Pad pads[2];

    Console() { std::fill_n(now.picture.colours, 32, COLOURS[0]); }

    bool load(const char* path) {
        std::ifstream file(path, std::ios::binary);
        Byte header[16];
        if (!file.read(reinterpret_cast<char*>(header), sizeof header)) return false;
        if (std::memcmp(header, "NES\x1a", 4) || header[6] & 4) return false;  // another file, or with 512 bytes more
        if ((header[6] >> 4 | (header[7] & 0xf0)) != 0 || (header[4] != 1 && header[4] != 2)) return false;
        program.resize(0x4000 * header[4]);
        patterns.resize(header[5] ? 0x2000 * header[5] : 0x2000);
        program_mask = static_cast<Address>(program.size() - 1);
        patterns_writable = !header[5];
        has_extended = header[6] & 2;
        switch (header[6] & 0xb) {
            case 0: pages[2] = pages[3] = 0x400; break;   // the same picture on the left and on the right
            case 1: pages[1] = pages[3] = 0x400; break;   // the same above and below
        }
        if (!file.read(reinterpret_cast<char*>(program.data()), program.size())) return false;
        return patterns_writable || file.read(reinterpret_cast<char*>(patterns.data()), patterns.size());
    }

    void reset() {
        draw();  // what the screen goes on showing
        Processor& cpu = now.processor;
        cpu = {};
        cpu.flags = FLAGS_AT_RESET;
        cpu.stack = 0xfd;
        cpu.counter = read_word(RESET);
        Picture& p = now.picture;
        p.phase = Picture::BEFORE;
        p.dot = p.line = p.sprites_on_line = 0;
        p.tall_sprites = p.interrupts = p.blank = false;
        p.show_background = p.show_sprites = p.even_frame = p.first_write = true;
        p.background_patterns = p.sprite_patterns = p.address = p.next_address = 0;
        p.sprite_address = p.fine_x = 0;
        p.increment = 1;
        now.owed = 0;
        now.due = dots_to_blank();
    }

    // Play a frame. Without `drawing`, it is drawn when `draw` is called, if it is.
    void step(bool drawing) {
        drawn = drawing || patterns_writable;  // patterns are kept once only: no frame could be played again
        if (!drawn) {
            begun = now;
            std::copy_n(pads, 2, begun_pads);
        }
        play();
    }

    void backup(int slot) { saved[slot] = *this; }
    void restore(int slot) { static_cast<Moment&>(*this) = saved[slot]; }
    Byte* memory() { return now.memory; }

    // Bring the screen up to date and return it.
    Pixel* draw() {
        if (drawn) return *screen;
        drawn = true;
        const State after = now;
        const Pad pads_after[2] = {pads[0], pads[1]};
        now = begun;
        std::copy_n(begun_pads, 2, pads);
        play();
        now = after;
        std::copy_n(pads_after, 2, pads);
        return *screen;
    }

   private:
    Moment saved[2];
    std::vector<Byte> program, patterns;
    Address program_mask = 0;
    bool patterns_writable = false, has_extended = false;
    int pages[4] = {0, 0, 0, 0};  // where each of the four pictures begins in video memory

    void play() {
        Processor& cpu = now.processor;
        for (int left = CYCLES; left > 0;) {
            int idle = std::max(cpu.busy - 1, 0), cycles = std::min(idle + 1, left);
            if (now.owed + 3 * cycles >= now.due) {  // the vertical blank may come before the next instruction
                cycles = std::max((now.due - now.owed + 2) / 3, 1);
                cpu.busy -= cycles - 1;
                cpu.cycles += cycles;
                now.owed += 3 * cycles;
                left -= cycles;
                catch_up();
                if (cpu.busy-- <= 1) execute();
                continue;
            }
            now.owed += 3 * cycles;
            cpu.cycles += cycles;
            left -= cycles;
            if (cycles <= idle) {
                cpu.busy -= cycles;
                continue;
            }
            execute();
            if (cpu.waiting) {  // in turns of three cycles
                int turns = std::min(left, (now.due - now.owed - 1) / 3) / 3;
                now.owed += 9 * turns;
                cpu.cycles += 3 * turns;
                left -= 3 * turns;
            }
        }
        catch_up();  // the screen may be looked at
    }

    // ----------------------------------------------------------------------------------------------- memory

    Byte read(Address address) {
        if (address < 0x2000) return now.memory[address & 0x7ff];
        if (address >= 0x8000) return program[address & program_mask];
        return read_elsewhere(address);
    }

    [[gnu::noinline]] Byte read_elsewhere(Address address) {
        if (address >= 0x6000) return has_extended ? now.extended[address - 0x6000] : 0;
        return read_register(address);
    }

    Address read_word(Address address) { return read(address) | read(address + 1) << 8; }

    void write(Address address, Byte value) {
        if (address < 0x2000)
            now.memory[address & 0x7ff] = value;
        else
            write_elsewhere(address, value);
    }

    [[gnu::noinline]] void write_elsewhere(Address address, Byte value) {
        if (address < 0x6000)
            write_register(address, value);
        else if (address < 0x8000 && has_extended)
            now.extended[address - 0x6000] = value;
    }

    Byte read_register(Address address) {
        if (address == 0x4016 || address == 0x4017) return pads[address & 1].read();
        if (address >= 0x4000) return 0;
        catch_up();
        Picture& p = now.picture;
        switch (address & 7) {
            case 2: {
                Byte status = p.hit << 6 | p.blank << 7;
                p.blank = false;
                p.first_write = true;
                return status;
            }
            case 4: return p.sprites[p.sprite_address];
            case 7: {
                Byte value = read_video(p.address);
                p.address += p.increment;
                if (p.address < 0x3f00) std::swap(value, p.read_buffer);
                return value;
            }
        }
        return 0;
    }

    void write_register(Address address, Byte value) {
        if (address == 0x4016) {
            for (Pad& pad : pads) {
                pad.strobe = value & 1;
                if (!pad.strobe) pad.bits = pad.buttons;
            }
            return;
        }
        if (address >= 0x4000 && address != 0x4014) return;
        catch_up();
        Picture& p = now.picture;
        if (address == 0x4014) {  // copy a page to the sprites, while the processor waits
            now.processor.busy += 513 + (now.processor.cycles & 1);
            for (int i = 0; i < 256; i++) p.sprites[(p.sprite_address + i) & 255] = read(value << 8 | i);
            return;
        }
        switch (address & 7) {
            case 0:
                p.interrupts = value & 0x80;
                p.tall_sprites = value & 0x20;
                p.background_patterns = value & 0x10 ? 0x1000 : 0;
                p.sprite_patterns = value & 8 ? 0x1000 : 0;
                p.increment = value & 4 ? 32 : 1;
                p.next_address = (p.next_address & ~0xc00) | (value & 3) << 10;
                break;
            case 1:
                p.hide_left_background = !(value & 2);
                p.hide_left_sprites = !(value & 4);
                p.show_background = value & 8;
                p.show_sprites = value & 0x10;
                break;
            case 3: p.sprite_address = value; break;
            case 4: p.sprites[p.sprite_address++] = value; break;
            case 5:
                if (p.first_write) {
                    p.next_address = (p.next_address & ~0x1f) | value >> 3;
                    p.fine_x = value & 7;
                } else {
                    p.next_address = (p.next_address & ~0x73e0) | (value & 7) << 12 | (value & 0xf8) << 2;
                }
                p.first_write = !p.first_write;
                break;
            case 6:
                if (p.first_write) {
                    p.next_address = (p.next_address & 0xff) | (value & 0x3f) << 8;
                } else {
                    p.next_address = (p.next_address & 0xff00) | value;
                    p.address = p.next_address;
                }
                p.first_write = !p.first_write;
                break;
            case 7:
                write_video(p.address, value);
                p.address += p.increment;
                break;
        }
    }

    Byte& tile_memory(Address address) { return now.picture.memory[pages[address >> 10 & 3] + (address & 0x3ff)]; }

    Byte read_video(Address address) {
        if (address < 0x2000) return patterns[address];
        if (address < 0x3eff) return tile_memory(address < 0x3000 ? address : address | 0xc00);
        return address < 0x3fff ? now.picture.palette[address & 31] : 0;
    }

    void write_video(Address address, Byte value) {
        if (address < 0x2000) {
            if (patterns_writable) patterns[address] = value;
        } else if (address < 0x3eff) {
            tile_memory(address < 0x3000 ? address : address | 0xc00) = value;
        } else if (address < 0x3fff) {
            int entry = address == 0x3f10 ? 0 : address & 31;
            now.picture.palette[entry] = value;
            now.picture.colours[entry] = COLOURS[value & 63];
        }
    }

    // ---------------------------------------------------------------------------------------------- picture

    void catch_up() {
        int dots = now.owed;
        now.owed = 0;
        Picture& p = now.picture;
        while (dots > 0) {
            int passed = 1;
            switch (p.phase) {
                case Picture::BEFORE: before(); break;
                case Picture::VISIBLE:
                    if (p.dot <= WIDTH) {
                        passed = std::min(dots, WIDTH + 1 - p.dot);
                        pass(p.dot - 1, p.dot - 1 + passed);
                    } else if (p.dot > WIDTH + 2 && p.dot < DOTS) {
                        passed = std::min(dots, DOTS - p.dot);
                    } else {
                        after_line();
                    }
                    break;
                case Picture::AFTER:
                case Picture::BLANK:
                    if (p.phase == Picture::BLANK && p.line == BLANK_LINE && p.dot == 1) {
                        p.blank = true;
                        if (p.interrupts) interrupt(NMI);
                    } else if (p.dot < DOTS) {
                        passed = std::min(dots, DOTS - p.dot);
                    } else {
                        p.dot = 0;
                        p.line++;
                        if (p.phase == Picture::AFTER) {
                            p.phase = Picture::BLANK;
                        } else if (p.line > LAST_LINE) {
                            p.phase = Picture::BEFORE;
                            p.line = 0;
                            p.even_frame = !p.even_frame;
                        }
                    }
                    break;
            }
            p.dot += passed;
            dots -= passed;
        }
        now.due = dots_to_blank();
    }

    // A lower bound: the line before the picture may be one dot shorter.
    int dots_to_blank() const {
        const Picture& p = now.picture;
        constexpr int PICTURE = HEIGHT * DOTS + DOTS + 1;
        int line = DOTS + 1 - p.dot;  // the rest of this one
        switch (p.phase) {
            case Picture::BEFORE: return std::max(line - 1, 1) + PICTURE;
            case Picture::VISIBLE: return line + (HEIGHT - p.line) * DOTS + 1;
            case Picture::AFTER: return line + 1;
            case Picture::BLANK: break;
        }
        bool ahead = p.line == BLANK_LINE && p.dot <= 1;
        return ahead ? 1 : line + (LAST_LINE - p.line) * DOTS + DOTS - 1 + PICTURE;
    }

    void before() {
        Picture& p = now.picture;
        if (p.dot == 1)
            p.blank = p.hit = false;
        else if (p.dot == WIDTH + 2 && p.rendering())
            p.address = (p.address & ~0x41f) | (p.next_address & 0x41f);
        else if (p.dot > 280 && p.dot <= 304 && p.rendering())
            p.address = (p.address & ~0x7be0) | (p.next_address & 0x7be0);
        if (p.dot >= DOTS - (!p.even_frame && p.rendering())) {
            p.phase = Picture::VISIBLE;
            p.dot = p.line = 0;
        }
    }

    void after_line() {
        Picture& p = now.picture;
        if (p.dot == WIDTH + 1 && p.show_background) {
            if ((p.address & 0x7000) != 0x7000) {
                p.address += 0x1000;
            } else {  // the next row of tiles; after the last one, in the picture below
                int row = p.address >> 5 & 31;
                p.address = (p.address & ~0x73e0) | (row == 29 || row == 31 ? 0 : (row + 1) << 5);
                if (row == 29) p.address ^= 0x800;
            }
        } else if (p.dot == WIDTH + 2 && p.rendering()) {
            p.address = (p.address & ~0x41f) | (p.next_address & 0x41f);
        }
        if (p.dot < DOTS) return;
        p.sprites_on_line = 0;  // of the next line
        int height = p.tall_sprites ? 16 : 8;
        for (int i = p.sprite_address / 4; i < 64 && p.sprites_on_line < 8; i++) {
            int row = p.line - p.sprites[4 * i];
            if (0 <= row && row < height) p.on_line[p.sprites_on_line++] = static_cast<Byte>(i);
        }
        p.dot = 0;
        if (++p.line == HEIGHT) p.phase = Picture::AFTER;
    }

    // Pass the pixels of the line from `first` to before `end`. They are drawn if they are looked at, or to see whether sprite 0
    // meets the background.
    void pass(int first, int end) {
        Picture& p = now.picture;
        bool may_hit = p.rendering() && !p.hit && p.sprites_on_line && p.on_line[0] == 0;
        if (!drawn && !may_hit) {
            if (p.show_background) pass_tiles((p.fine_x + end) / 8 - (p.fine_x + first) / 8);
            return;
        }
        Byte entries[WIDTH + 8];  // of the palette
        if (p.show_background)
            draw_background(entries, first, end);
        else
            std::memset(entries + first, 0, end - first);
        if (p.show_sprites && p.sprites_on_line) draw_sprites(entries, first, end);
        if (!drawn) return;
        Pixel* row = screen[p.line];
        for (int x = first; x < end; x++) row[x] = p.colours[entries[x]];
    }

    void pass_tiles(int count) {
        Address& at = now.picture.address;
        int column = (at & 31) + count;
        at = ((at & ~31) | (column & 31)) ^ (column & 32 ? 0x400 : 0);
    }

    void draw_background(Byte* entries, int first, int end) {
        Picture& p = now.picture;
        for (int x = first; x < end;) {
            int skipped = (p.fine_x + x) & 7, count = std::min(8 - skipped, end - x);
            Address at = p.address;
            int tile = tile_memory(at);
            const Byte* pattern = &patterns[p.background_patterns | tile << 4 | (at >> 12 & 7)];
            uint64_t row = tile_row(pattern[0], pattern[8]);
            int attributes = tile_memory(0x3c0 | (at & 0xc00) | (at >> 4 & 0x38) | (at >> 2 & 7));
            uint64_t opaque = (row | row >> 1) & EACH_BYTE;
            row |= opaque * ((attributes >> ((at >> 4 & 4) | (at & 2)) & 3) << 2);
            row >>= 8 * skipped;
            std::memcpy(entries + x, &row, 8);  // what is beyond `count` is overwritten or not looked at
            x += count;
            if (skipped + count == 8) pass_tiles(1);
        }
        if (p.hide_left_background && first < 8) std::memset(entries + first, 0, std::min(end, 8) - first);
    }

    void draw_sprites(Byte* entries, int first, int end) {
        Picture& p = now.picture;
        bool taken[WIDTH];  // by a sprite in front
        std::memset(taken + first, 0, end - first);
        if (p.hide_left_sprites) first = std::max(first, 8);
        for (int number = 0; number < p.sprites_on_line; number++) {
            int i = p.on_line[number];
            const Byte* sprite = p.sprites + 4 * i;
            int left = sprite[3], from = std::max(first, left), to = std::min(end, left + 8);
            if (from >= to) continue;
            int tile = sprite[1], attributes = sprite[2];
            int height = p.tall_sprites ? 16 : 8;
            int y = (p.line - static_cast<Byte>(sprite[0] + 1)) % height;
            if (attributes & 0x80) y ^= height - 1;
            // On the first line, which shows the sprites below the last one, y is negative.
            Address pattern = p.tall_sprites ? ((tile >> 1) * 32 + ((y & 7) | (y & 8) << 1)) | (tile & 1) << 12
                                             : p.sprite_patterns + tile * 16 + y;
            uint64_t row = tile_row(read_video(pattern), read_video(pattern + 8));
            if (attributes & 0x40) row = __builtin_bswap64(row);
            for (int x = from; x < to; x++) {
                Byte colour = row >> 8 * (x - left) & 3;
                if (!colour || taken[x]) continue;
                taken[x] = true;
                if (i == 0 && entries[x]) p.hit = true;  // the background is 0 where it is not shown
                if (!entries[x] || !(attributes & 0x20)) entries[x] = 0x10 | (attributes & 3) << 2 | colour;
            }
        }
    }

    // -------------------------------------------------------------------------------------------- processor

    void push(Byte value) { now.memory[0x100 | now.processor.stack--] = value; }
    Byte pop() { return now.memory[0x100 | ++now.processor.stack]; }
    void push_word(Address value) {
        push(value >> 8);
        push(value & 0xff);
    }
    Address pop_word() {
        Byte low = pop();
        return low | pop() << 8;
    }

    void interrupt(Address vector) {
        Processor& cpu = now.processor;
        cpu.waiting = false;
        push_word(cpu.counter);
        push(cpu.flags | NO_INTERRUPT | (vector == BRK ? BREAK : 0));
        cpu.flags |= NO_INTERRUPT;
        cpu.counter = read_word(vector);
        cpu.busy += 7;
    }

    void set(Byte flag, bool on) {
        Byte& flags = now.processor.flags;
        flags = on ? flags | flag : flags & ~flag;
    }
    Byte set_sign(Byte value) {
        set(ZERO, !value);
        set(NEGATIVE, value & 0x80);
        return value;
    }
    bool is(Byte flag) const { return now.processor.flags & flag; }

    // Addresses of operands.
    Address immediate() { return now.processor.counter++; }
    Address zero_page() { return read(now.processor.counter++); }
    Address zero_page(Byte index) { return (read(now.processor.counter++) + index) & 0xff; }
    Address absolute() {
        Address address = read_word(now.processor.counter);
        now.processor.counter += 2;
        return address;
    }
    Address indexed(Address base, Byte index, bool longer) {
        Address address = base + index;
        if (longer && (base & 0xff00) != (address & 0xff00)) now.processor.busy++;  // another page
        return address;
    }
    Address zero_word(Byte address) { return read(address) | read((address + 1) & 0xff) << 8; }
    Address indirect_x() { return zero_word(read(now.processor.counter++) + now.processor.x); }
    Address indirect_y(bool longer) {
        return indexed(zero_word(read(now.processor.counter++)), now.processor.y, longer);
    }

    void branch(bool taken) {
        Processor& cpu = now.processor;
        int8_t offset = read(cpu.counter++);
        if (!taken) return;
        Address target = cpu.counter + offset;
        cpu.busy += (target & 0xff00) != (cpu.counter & 0xff00) ? 3 : 1;
        cpu.counter = target;
    }

    void compare(Byte value, Byte with) {
        set(CARRY, value >= with);
        set_sign(value - with);
    }
    void add(Byte value) {
        Byte& a = now.processor.a;
        int sum = a + value + is(CARRY);
        set(CARRY, sum & 0x100);
        set(OVERFLOW, (a ^ sum) & (value ^ sum) & 0x80);
        a = set_sign(sum);
    }
    Byte shift_left(Byte value, bool carry) {
        set(CARRY, value & 0x80);
        return set_sign(value << 1 | carry);
    }
    Byte shift_right(Byte value, bool carry) {
        set(CARRY, value & 1);
        return set_sign(value >> 1 | carry << 7);
    }

    // Instructions with an operand in memory, by the upper three bits of their code.
    void arithmetic(int operation, Address at) {
        Byte& a = now.processor.a;
        switch (operation) {
            case 0: a = set_sign(a | read(at)); break;
            case 1: a = set_sign(a & read(at)); break;
            case 2: a = set_sign(a ^ read(at)); break;
            case 3: add(read(at)); break;
            case 4: write(at, a); break;
            case 5: a = set_sign(read(at)); break;
            case 6: compare(a, read(at)); break;
            case 7: add(~read(at)); break;
        }
    }
    Byte shift(int operation, Byte value) {
        bool carry = is(CARRY) && operation & 1;  // rotate
        return operation < 2 ? shift_left(value, carry) : shift_right(value, carry);
    }
    void modify(int operation, Address at) {
        Processor& cpu = now.processor;
        switch (operation) {
            case 4: write(at, cpu.x); break;
            case 5: cpu.x = set_sign(read(at)); break;
            case 6: write(at, set_sign(read(at) - 1)); break;
            case 7: write(at, set_sign(read(at) + 1)); break;
            default: write(at, shift(operation, read(at)));
        }
    }
    void other(int operation, Address at) {
        Processor& cpu = now.processor;
        switch (operation) {
            case 1: {
                Byte value = read(at);
                set(ZERO, !(cpu.a & value));
                set(OVERFLOW, value & 0x40);
                set(NEGATIVE, value & 0x80);
                break;
            }
            case 4: write(at, cpu.y); break;
            case 5: cpu.y = set_sign(read(at)); break;
            case 6: compare(cpu.y, read(at)); break;
            case 7: compare(cpu.x, read(at)); break;
        }
    }

    template <size_t... codes>
    friend constexpr auto instructions(std::index_sequence<codes...>);
    void execute();

    template <Byte code>
    void instruction() {
        Processor& cpu = now.processor;
        constexpr int operation = code >> 5;
        switch (code) {
            case 0x00: cpu.counter++; interrupt(BRK); break;
            case 0x08: push(cpu.flags); break;
            case 0x18: set(CARRY, false); break;
            case 0x20: {
                push_word(cpu.counter + 1);
                cpu.counter = read_word(cpu.counter);
                break;
            }
            case 0x28: cpu.flags = pop(); break;
            case 0x38: set(CARRY, true); break;
            case 0x40: cpu.flags = pop(); cpu.counter = pop_word(); break;
            case 0x48: push(cpu.a); break;
            case 0x4c: {
                Address target = read_word(cpu.counter);
                cpu.waiting = target == Address(cpu.counter - 1);
                cpu.counter = target;
                break;
            }
            case 0x58: set(NO_INTERRUPT, false); break;
            case 0x60: cpu.counter = pop_word() + 1; break;
            case 0x68: cpu.a = set_sign(pop()); break;
            case 0x6c: {  // the second byte of the address is on the page of the first
                Address at = read_word(cpu.counter);
                cpu.counter = read(at) | read((at & 0xff00) | ((at + 1) & 0xff)) << 8;
                break;
            }
            case 0x78: set(NO_INTERRUPT, true); break;
            case 0x88: set_sign(--cpu.y); break;
            case 0x8a: cpu.a = set_sign(cpu.x); break;
            case 0x98: cpu.a = set_sign(cpu.y); break;
            case 0x9a: cpu.stack = cpu.x; break;
            case 0xa8: cpu.y = set_sign(cpu.a); break;
            case 0xaa: cpu.x = set_sign(cpu.a); break;
            case 0xb8: set(OVERFLOW, false); break;
            case 0xba: cpu.x = set_sign(cpu.stack); break;
            case 0xc8: set_sign(++cpu.y); break;
            case 0xca: set_sign(--cpu.x); break;
            case 0xd8: set(DECIMAL, false); break;
            case 0xe8: set_sign(++cpu.x); break;
            case 0xea: break;
            case 0xf8: set(DECIMAL, true); break;

            case 0x10: branch(!is(NEGATIVE)); break;
            case 0x30: branch(is(NEGATIVE)); break;
            case 0x50: branch(!is(OVERFLOW)); break;
            case 0x70: branch(is(OVERFLOW)); break;
            case 0x90: branch(!is(CARRY)); break;
            case 0xb0: branch(is(CARRY)); break;
            case 0xd0: branch(!is(ZERO)); break;
            case 0xf0: branch(is(ZERO)); break;

            case 0x0a: case 0x2a: case 0x4a: case 0x6a: cpu.a = shift(operation, cpu.a); break;

            default:
                if (!INSTRUCTION_CYCLES[code]) break;  // no instruction
                switch (code & 3) {
                    case 1: execute_arithmetic(operation, code >> 2 & 7); break;
                    case 2: modify(operation, operand(code >> 2 & 7, operation == 4 || operation == 5 ? cpu.y : cpu.x)); break;
                    case 0: other(operation, operand(code >> 2 & 7, cpu.x)); break;
                }
        }
        cpu.busy += INSTRUCTION_CYCLES[code];
    }

    void execute_arithmetic(int operation, int mode) {
        Processor& cpu = now.processor;
        bool longer = operation != 4;  // storing takes the same time for all addresses
        switch (mode) {
            case 0: return arithmetic(operation, indirect_x());
            case 1: return arithmetic(operation, zero_page());
            case 2: return arithmetic(operation, immediate());
            case 3: return arithmetic(operation, absolute());
            case 4: return arithmetic(operation, indirect_y(longer));
            case 5: return arithmetic(operation, zero_page(cpu.x));
            case 6: return arithmetic(operation, indexed(absolute(), cpu.y, longer));
            case 7: return arithmetic(operation, indexed(absolute(), cpu.x, longer));
        }
    }

    Address operand(int mode, Byte index) {
        switch (mode) {
            case 0: return immediate();
            case 1: return zero_page();
            case 3: return absolute();
            case 5: return zero_page(index);
            default: return indexed(absolute(), index, true);
        }
    }
};

// The functions that execute the instructions, by code.
template <size_t... codes>
constexpr auto instructions(std::index_sequence<codes...>) {
    return std::array{+[](Console& console) { console.instruction<codes>(); }...};
}

inline void Console::execute() {
    static constexpr auto table = instructions(std::make_index_sequence<256>());
    now.processor.busy = 0;
    Byte code = read(now.processor.counter++);
    table[code](*this);
}

}  // namespace

extern "C" {
// Returns null for a file that cannot be read, or is a cartridge with a mapper.
Console* Initialize(const char* path) {
    auto* console = new Console();
    if (console->load(path)) return console;
    delete console;
    return nullptr;
}
Byte* Controller(Console* console, int port) { return &console->pads[port].buttons; }
Pixel* Screen(Console* console) { return console->draw(); }
Byte* Memory(Console* console) { return console->memory(); }
void Reset(Console* console) { console->reset(); }
void Step(Console* console, bool drawing) { console->step(drawing); }
void Backup(Console* console, int slot) { console->backup(slot); }  // slot: 0 or 1
void Restore(Console* console, int slot) { console->restore(slot); }
void Close(Console* console) { delete console; }
}
