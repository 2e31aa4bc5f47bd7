// Assembles the HLO module of a scan from the HLO module of its body.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace scan_hlo {

// What a parameter of the body is. A value >= 0 is the index of a carry.
enum Role : int64_t {
  kSliced = -1,     // row t of an input that is stacked over the steps
  kInvariant = -2,  // the same in every step
};

struct ScanSpec {
  int64_t n_carry = 0;
  int64_t length = 0;           // number of steps, at least 1: XLA refuses empty slices
  bool reverse = false;         // from the last row to the first
  std::vector<int64_t> roles;   // one per parameter of the body
  std::string name;             // of the module; constant, or XLA compiles each name anew
};

//   body:  (parameters by role) -> (carries'..., ys...)
//   scan:  (carries..., other body parameters in body order) -> (final carries..., stacked ys...)
//
// Sliced parameters become [length, ...] in the scan, ys too. Throws InputError.
std::string assemble_scan(std::string_view body, const ScanSpec& spec);

}  // namespace scan_hlo
