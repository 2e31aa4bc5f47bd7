// Reading: shapes and modules. Whatever is not understood is refused here, so
// that the code that builds can rely on it: XLA aborts the process on some of it.
#include <algorithm>
#include <limits>

#include "hlo.h"

namespace scan_hlo {
namespace {

// XLA keeps ids in an int.
constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

int64_t read_id(const Field& field, const char* what) {
  const int64_t id = field.as_integer(what);
  if (id < 0 || id > kMaxId) {
    throw InputError(std::string("malformed HLO: ") + what + " out of range: " + std::to_string(id));
  }
  return id;
}

// The number after the last dot of "add.12", or 0.
int64_t numeric_suffix(std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return 0;
  int64_t number = 0;
  for (char c : name.substr(dot + 1)) {
    if (c < '0' || c > '9') return 0;
    number = number * 10 + (c - '0');
    if (number > kMaxId) return 0;  // no id of ours gets there
  }
  return number;
}

InstructionView read_instruction(std::string_view message) {
  InstructionView result;
  Field field;
  for (Reader reader(message); reader.next(field);) {
    switch (field.number) {
      case instruction_field::kName: result.name = field.as_text("instruction name"); break;
      case instruction_field::kOpcode: result.opcode = field.as_text("opcode"); break;
      case instruction_field::kId: result.id = read_id(field, "instruction id"); break;
      case instruction_field::kCalled: field.append_integers_to(result.called, "called computations"); break;
      default: break;
    }
  }
  if (result.name.empty()) throw InputError("malformed HLO: an instruction without a name");
  if (result.opcode.empty()) throw InputError("malformed HLO: an instruction without an opcode");
  return result;
}

ComputationView read_computation(std::string_view message) {
  ComputationView result;
  result.message = message;
  Field field;
  for (Reader reader(message); reader.next(field);) {
    switch (field.number) {
      case computation_field::kName: result.name = field.as_text("computation name"); break;
      case computation_field::kInstructions:
        result.instructions.push_back(read_instruction(field.as_bytes("instruction")));
        break;
      case computation_field::kProgramShape: result.program_shape = field.as_bytes("program shape"); break;
      case computation_field::kId: result.id = read_id(field, "computation id"); break;
      default: break;
    }
  }
  if (result.name.empty()) throw InputError("malformed HLO: a computation without a name");
  return result;
}

struct RawShape {
  int64_t element_type = 0;
  std::vector<int64_t> dims;
  std::vector<std::string_view> elements;
  bool dynamic = false;
};

RawShape read_raw_shape(std::string_view message) {
  RawShape shape;
  std::vector<int64_t> is_dynamic;
  Field field;
  for (Reader reader(message); reader.next(field);) {
    switch (field.number) {
      case shape_field::kElementType: shape.element_type = field.as_integer("element type"); break;
      case shape_field::kDimensions: field.append_integers_to(shape.dims, "dimensions"); break;
      case shape_field::kTupleShapes: shape.elements.push_back(field.as_bytes("tuple shape")); break;
      case shape_field::kIsDynamic: field.append_integers_to(is_dynamic, "dynamic dimensions"); break;
      default: break;
    }
  }
  shape.dynamic = std::any_of(is_dynamic.begin(), is_dynamic.end(), [](int64_t flag) { return flag != 0; });
  return shape;
}

}  // namespace

Shape read_array_shape(std::string_view message, const std::string& what) {
  RawShape raw = read_raw_shape(message);
  if (raw.element_type == kTuple) throw InputError(what + " is a tuple; only arrays are supported");
  const bool is_array = raw.element_type > 0 && raw.element_type != kOpaque && raw.element_type != kToken;
  if (!is_array) {
    throw InputError(what + " is not an array (element type " + std::to_string(raw.element_type) + ")");
  }
  const bool unbounded = std::any_of(raw.dims.begin(), raw.dims.end(), [](int64_t size) { return size < 0; });
  if (raw.dynamic || unbounded) throw InputError(what + " has dynamic or negative dimensions");
  Shape shape{raw.element_type, std::move(raw.dims), {}};
  check_size(shape, what);
  return shape;
}

ProgramShape read_program_shape(std::string_view message) {
  ProgramShape program;
  size_t n_names = 0;
  bool has_result = false;
  Field field;
  for (Reader reader(message); reader.next(field);) {
    if (field.number == program_shape_field::kParameters) {
      const std::string what = "parameter " + std::to_string(program.parameters.size());
      program.parameters.push_back(read_array_shape(field.as_bytes("parameter shape"), what));
    } else if (field.number == program_shape_field::kResult) {
      const RawShape result = read_raw_shape(field.as_bytes("result shape"));
      if (result.element_type != kTuple) throw InputError("the body must return a tuple");
      program.results.clear();
      for (std::string_view element : result.elements) {
        const std::string what = "result " + std::to_string(program.results.size());
        program.results.push_back(read_array_shape(element, what));
      }
      has_result = true;
    } else if (field.number == program_shape_field::kParameterNames) {
      ++n_names;
    }
  }
  if (!has_result) throw InputError("malformed HLO: the entry computation has no result shape");
  if (n_names != program.parameters.size()) {
    throw InputError("malformed HLO: the entry computation names " + std::to_string(n_names) + " of its " +
                     std::to_string(program.parameters.size()) + " parameters");
  }
  return program;
}

const ComputationView& ModuleView::entry() const {
  for (const ComputationView& computation : computations) {
    if (computation.id == entry_id) return computation;
  }
  throw InputError("malformed HLO: no computation has the entry id " + std::to_string(entry_id));
}

int64_t ModuleView::last_used_id() const {
  int64_t last = 0;
  for (const ComputationView& computation : computations) {
    last = std::max({last, computation.id, numeric_suffix(computation.name)});
    for (const InstructionView& instruction : computation.instructions) {
      last = std::max({last, instruction.id, numeric_suffix(instruction.name)});
    }
  }
  return last;
}

ModuleView read_module(std::string_view message) {
  ModuleView module;
  Field field;
  for (Reader reader(message); reader.next(field);) {
    if (field.number == module_field::kComputations) {
      module.computations.push_back(read_computation(field.as_bytes("computation")));
    } else if (field.number == module_field::kEntryId) {
      module.entry_id = read_id(field, "entry computation id");
    }
  }
  if (module.entry_id < 0) throw InputError("malformed HLO: the module has no entry computation");
  return module;
}

}  // namespace scan_hlo
