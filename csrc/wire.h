// Protobuf's wire format, as much of it as HLO messages use.
//
// XLA's wheels ship neither protobuf headers nor .proto files, and the format is
// small and frozen, so reading it by hand is cheaper than depending on protobuf.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace scan_hlo {

// The input is wrong. Becomes ValueError in Python.
class InputError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

enum class WireType : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// One field of a message. `bytes` points into the message that was read.
struct Field {
  uint32_t number = 0;
  WireType type = WireType::kVarint;
  uint64_t varint = 0;
  std::string_view bytes;

  // The payload, if it has the expected wire type; `what` names the field in the error.
  int64_t as_integer(const char* what) const;
  std::string_view as_bytes(const char* what) const;
  std::string_view as_text(const char* what) const;  // non-empty, valid UTF-8
  // Repeated integers come packed or one by one: a parser must accept both.
  void append_integers_to(std::vector<int64_t>& out, const char* what) const;
};

// Iterates over the fields of one message. Never reads past its end, never recurses.
class Reader {
 public:
  explicit Reader(std::string_view message) : rest_(message) {}
  bool next(Field& field);
  bool done() const { return rest_.empty(); }
  uint64_t varint();

 private:
  std::string_view take(uint64_t count);
  std::string_view rest_;
};

// Appends fields to a message under construction.
class Writer {
 public:
  Writer& integer(uint32_t number, int64_t value);
  Writer& bytes(uint32_t number, std::string_view value);
  Writer& integers(uint32_t number, const std::vector<int64_t>& values);  // packed
  Writer& append(const Writer& other);                                    // other's fields, as they are
  const std::string& str() const { return out_; }

 private:
  std::string out_;
};

bool is_utf8(std::string_view text);

}  // namespace scan_hlo
