// Mutates HLO modules and feeds them to the assembler, with the sanitizers on
// (`make fuzz-csrc`). Deterministic: case k is the same on every machine, so a crash
// is reproduced by its number:
//
//   fuzz_csrc SECONDS [FIRST_CASE]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "hlo.h"
#include "scan.h"

using namespace scan_hlo;

namespace {

using Random = std::mt19937_64;  // its sequence is fixed by the C++ standard

uint64_t below(Random& random, uint64_t bound) { return random() % bound; }

const Shape kMatrix{11, {2, 3}, {}};
const Shape kRow{11, {4}, {}};
const Shape kScalar{5, {}, {}};

// (carry 0, x, weight, carry 1) -> (carry 0, carry 1, y)
std::string seed_body() {
  const ModuleView nothing;
  ModuleBuilder module(nothing);
  ComputationBuilder builder(module, "body");
  const Value carry = builder.parameter(kMatrix);
  const Value x = builder.parameter(kRow);
  builder.parameter(kScalar);
  const Value counter = builder.parameter(kScalar);
  const Value root = builder.tuple({builder.add(carry, carry), builder.add(counter, counter), x});
  const int64_t entry = builder.finish(root);
  return module.finish("body", entry, encode_program_shape(builder.parameters(), root.shape));
}

ScanSpec seed_spec() { return {2, 5, false, {0, kSliced, kInvariant, 1}, "scan"}; }

int64_t any_integer(Random& random) {
  const uint64_t bits = below(random, 65);
  return static_cast<int64_t>(bits == 0 ? 0 : random() >> (64 - bits));
}

std::string any_varint(Random& random) {
  const std::string field = Writer().integer(1, any_integer(random)).str();
  return field.substr(1);  // without its key
}

void mutate_once(std::string& bytes, const std::string& other, Random& random) {
  if (bytes.empty()) bytes.push_back('\0');
  const size_t at = below(random, bytes.size());
  const size_t count = 1 + below(random, 8);
  switch (below(random, 7)) {
    case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(random, 8))); break;
    case 1: bytes[at] = static_cast<char>(random()); break;
    case 2: bytes.erase(at, count); break;
    case 3: bytes.insert(at, any_varint(random)); break;
    case 4: bytes.replace(at, 1, any_varint(random)); break;
    case 5: bytes.insert(at, other, below(random, other.size()), count * 8); break;
    case 6: bytes.resize(at); break;
  }
}

void mutate(ScanSpec& spec, Random& random) {
  switch (below(random, 6)) {
    case 0: spec.n_carry = any_integer(random); break;
    case 1: spec.length = any_integer(random); break;
    case 2: spec.reverse = !spec.reverse; break;
    case 3: spec.roles.resize(below(random, 8), kInvariant); break;
    case 4: if (!spec.roles.empty()) spec.roles[below(random, spec.roles.size())] = any_integer(random); break;
    case 5: if (!spec.roles.empty()) spec.roles[below(random, spec.roles.size())] = -static_cast<int64_t>(below(random, 4)); break;
  }
}

// Whether the assembler accepted the case.
bool run_case(uint64_t number, const std::vector<std::string>& seeds) {
  Random random(number);
  std::string body = seeds[below(random, seeds.size())];
  ScanSpec spec = seed_spec();
  for (uint64_t k = below(random, 6); k > 0; --k) mutate_once(body, seeds[0], random);
  if (below(random, 3) == 0) mutate(spec, random);
  // A copy of exactly this size, so that a read past the end hits a red zone.
  const std::vector<char> exact(body.begin(), body.end());
  try {
    const std::string scan = assemble_scan({exact.data(), exact.size()}, spec);
    read_module(scan).entry();  // what we write, we can read
    if (scan.size() > 64 * body.size() + (size_t{1} << 16)) {
      std::printf("case %llu: %zu bytes became %zu\n", static_cast<unsigned long long>(number), body.size(), scan.size());
      std::abort();
    }
    return true;
  } catch (const InputError&) {
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 20;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  std::vector<std::string> seeds{seed_body()};
  seeds.push_back(assemble_scan(seeds[0], seed_spec()));  // several computations, a while
  const auto start = std::chrono::steady_clock::now();
  uint64_t cases = 0, accepted = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    // Written before it runs: after a crash, the last line names the case to start from.
    if (cases % 10000 == 0) std::fprintf(stderr, "from case %llu\n", static_cast<unsigned long long>(first + cases));
    accepted += run_case(first + cases++, seeds);
  }
  std::printf("%llu cases, %llu accepted, no crash\n", static_cast<unsigned long long>(cases),
              static_cast<unsigned long long>(accepted));
  return accepted > 0 && accepted < cases ? 0 : 1;
}
