#include "wire.h"

namespace scan_hlo {
namespace {

constexpr uint64_t kMaxFieldNumber = (uint64_t{1} << 29) - 1;

void append_varint(std::string& out, uint64_t value) {
  while (value >= 0x80) {
    out.push_back(static_cast<char>((value & 0x7f) | 0x80));
    value >>= 7;
  }
  out.push_back(static_cast<char>(value));
}

void append_key(std::string& out, uint32_t number, WireType type) {
  append_varint(out, (uint64_t{number} << 3) | static_cast<uint64_t>(type));
}

[[noreturn]] void wrong_type(const char* what) {
  throw InputError(std::string("malformed HLO: ") + what + " has the wrong wire type");
}

}  // namespace

int64_t Field::as_integer(const char* what) const {
  if (type != WireType::kVarint) wrong_type(what);
  return static_cast<int64_t>(varint);
}

std::string_view Field::as_bytes(const char* what) const {
  if (type != WireType::kBytes) wrong_type(what);
  return bytes;
}

std::string_view Field::as_text(const char* what) const {
  std::string_view text = as_bytes(what);
  if (text.empty()) throw InputError(std::string("malformed HLO: ") + what + " is empty");
  if (!is_utf8(text)) throw InputError(std::string("malformed HLO: ") + what + " is not valid UTF-8");
  return text;
}

void Field::append_integers_to(std::vector<int64_t>& out, const char* what) const {
  if (type == WireType::kVarint) {
    out.push_back(static_cast<int64_t>(varint));
    return;
  }
  for (Reader reader(as_bytes(what)); !reader.done();) {
    out.push_back(static_cast<int64_t>(reader.varint()));
  }
}

uint64_t Reader::varint() {
  uint64_t value = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    if (rest_.empty()) throw InputError("malformed HLO: truncated varint");
    const auto byte = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    // Ten bytes hold 70 bits: the last may only contribute the 64th.
    if (shift == 63 && byte > 1) break;
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return value;
  }
  throw InputError("malformed HLO: varint longer than 64 bits");
}

std::string_view Reader::take(uint64_t count) {
  if (count > rest_.size()) {
    throw InputError("malformed HLO: truncated message, a field of " + std::to_string(count) +
                     " bytes where " + std::to_string(rest_.size()) + " are left");
  }
  const std::string_view taken = rest_.substr(0, count);
  rest_.remove_prefix(count);
  return taken;
}

bool Reader::next(Field& field) {
  if (done()) return false;
  const uint64_t key = varint();
  const uint64_t number = key >> 3;
  if (number == 0 || number > kMaxFieldNumber) {
    throw InputError("malformed HLO: bad field number " + std::to_string(number));
  }
  field = Field{};
  field.number = static_cast<uint32_t>(number);
  field.type = static_cast<WireType>(key & 7);
  switch (field.type) {
    case WireType::kVarint: field.varint = varint(); return true;
    case WireType::kFixed64: field.bytes = take(8); return true;
    case WireType::kBytes: field.bytes = take(varint()); return true;
    case WireType::kFixed32: field.bytes = take(4); return true;
  }
  throw InputError("malformed HLO: bad wire type " + std::to_string(key & 7));
}

Writer& Writer::integer(uint32_t number, int64_t value) {
  append_key(out_, number, WireType::kVarint);
  append_varint(out_, static_cast<uint64_t>(value));
  return *this;
}

Writer& Writer::bytes(uint32_t number, std::string_view value) {
  append_key(out_, number, WireType::kBytes);
  append_varint(out_, value.size());
  out_.append(value);
  return *this;
}

Writer& Writer::integers(uint32_t number, const std::vector<int64_t>& values) {
  if (values.empty()) return *this;
  std::string packed;
  for (int64_t value : values) append_varint(packed, static_cast<uint64_t>(value));
  return bytes(number, packed);
}

Writer& Writer::append(const Writer& other) {
  out_.append(other.out_);
  return *this;
}

bool is_utf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<uint8_t>(text[i++]);
    const int tail = lead < 0x80 ? 0 : lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (tail == 0) continue;
    if (lead < 0xc2 || lead > 0xf4) return false;  // a stray tail, an overlong pair, or beyond U+10FFFF
    if (text.size() - i < static_cast<size_t>(tail)) return false;
    uint32_t code = lead & (0x3f >> tail);
    for (int k = 0; k < tail; ++k) {
      const auto byte = static_cast<uint8_t>(text[i++]);
      if ((byte & 0xc0) != 0x80) return false;
      code = (code << 6) | (byte & 0x3f);
    }
    const uint32_t smallest = tail == 3 ? 0x10000 : tail == 2 ? 0x800 : 0x80;
    const bool surrogate = code >= 0xd800 && code <= 0xdfff;
    if (code < smallest || code > 0x10ffff || surrogate) return false;
  }
  return true;
}

}  // namespace scan_hlo
