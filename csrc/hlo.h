// The HLO messages a scan needs: shapes, a read-only view of a module, and a
// builder that writes new computations behind it. Field numbers are those of
// xla/xla_data.proto and xla/service/hlo.proto; they are part of XLA's wire
// format and cannot change.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wire.h"

namespace scan_hlo {

namespace module_field {
enum : uint32_t { kName = 1, kEntryName = 2, kComputations = 3, kHostProgramShape = 4, kId = 5, kEntryId = 6 };
}
namespace computation_field {
enum : uint32_t { kName = 1, kInstructions = 2, kProgramShape = 4, kId = 5, kRootId = 6 };
}
namespace instruction_field {
enum : uint32_t {
  kName = 1, kOpcode = 2, kShape = 3, kLiteral = 8, kParameterNumber = 9, kTupleIndex = 13,
  kDynamicSliceSizes = 20, kId = 35, kOperands = 36, kCalled = 38, kBackendConfig = 43,
  kComparisonDirection = 63, kComparisonType = 72,
};
}
namespace shape_field {
enum : uint32_t { kElementType = 2, kDimensions = 3, kTupleShapes = 4, kLayout = 5, kIsDynamic = 6 };
}
namespace layout_field {
enum : uint32_t { kMinorToMajor = 1 };
}
namespace program_shape_field {
enum : uint32_t { kParameters = 1, kResult = 2, kParameterNames = 3 };
}
namespace literal_field {
enum : uint32_t { kShape = 1, kS32s = 4 };
}

// xla.PrimitiveType, the ones we have to know by name.
enum ElementType : int64_t { kPred = 1, kS32 = 4, kTuple = 13, kOpaque = 14, kToken = 17 };

// An array shape, or a flat tuple of them. Layouts are not kept: before XLA's
// layout assignment they mean nothing, so we always write the default one.
struct Shape {
  int64_t element_type = 0;
  std::vector<int64_t> dims;
  std::vector<Shape> elements;  // of a tuple

  bool is_tuple() const { return element_type == kTuple; }
  bool operator==(const Shape& other) const;
  std::string str() const;  // "f32[2,3]"
  std::string encode() const;
};

Shape scalar(int64_t element_type);
Shape tuple_of(std::vector<Shape> elements);
// Refuses shapes whose size in bytes would not fit in 64 bits.
void check_size(const Shape& shape, const std::string& what);
// `count` of this shape, along a new first dimension.
Shape stacked(const Shape& shape, int64_t count);

// `what` names the shape in errors: "parameter 3", "result 0".
Shape read_array_shape(std::string_view message, const std::string& what);

struct ProgramShape {
  std::vector<Shape> parameters;
  std::vector<Shape> results;  // the elements of the result tuple
};
ProgramShape read_program_shape(std::string_view message);
std::string encode_program_shape(const std::vector<Shape>& parameters, const Shape& result);

// Views into the bytes of a serialized module: valid as long as those bytes are.
struct InstructionView {
  std::string_view name, opcode;
  int64_t id = 0;
  std::vector<int64_t> called;  // of a while: body, condition
};
struct ComputationView {
  std::string_view message, name, program_shape;
  int64_t id = 0;
  std::vector<InstructionView> instructions;
};
struct ModuleView {
  std::vector<ComputationView> computations;
  int64_t entry_id = -1;

  const ComputationView& entry() const;
  // Instructions and computations share one id space, and names must be unique
  // too: above this number, an id and a name ending in ".id" are both free.
  int64_t last_used_id() const;
};
ModuleView read_module(std::string_view message);

// Computations appended to the verbatim ones of an existing module.
class ModuleBuilder {
 public:
  explicit ModuleBuilder(const ModuleView& base);
  int64_t next_id();
  void add_computation(std::string_view message);
  std::string finish(const std::string& name, int64_t entry_id, std::string_view program_shape) const;

 private:
  int64_t last_id_;
  Writer computations_;
};

struct Value {
  int64_t id = 0;
  Shape shape;
};

// One computation under construction: call the instructions in order, then finish().
class ComputationBuilder {
 public:
  ComputationBuilder(ModuleBuilder& module, std::string name) : module_(module), name_(std::move(name)) {}

  Value parameter(const Shape& shape);
  Value constant_s32(int64_t value);
  Value zeros(const Shape& shape);
  Value element(const Value& tuple, size_t index);
  Value tuple(const std::vector<Value>& values);
  Value reshape(const Value& value, const Shape& shape);
  Value add(const Value& left, const Value& right);
  Value subtract(const Value& left, const Value& right);
  Value less_than(const Value& left, const Value& right);
  Value call(int64_t computation, const Shape& result, const std::vector<Value>& arguments);
  Value while_loop(const Value& state, int64_t body, int64_t condition, int64_t trip_count);
  // source[index], and source with source[index] = item: index counts along dimension 0.
  Value read_row(const Value& source, const Value& index);
  Value write_row(const Value& source, const Value& item, const Value& index);

  int64_t finish(const Value& root);  // the computation's id
  const std::vector<Shape>& parameters() const { return parameters_; }

 private:
  // Operands are ids: a Value carries its shape, which for the loop state is large.
  Value instruction(std::string_view opcode, const Shape& shape, const std::vector<int64_t>& operands,
                    const Writer& attributes = {});
  void append_row_start(std::vector<int64_t>& operands, const Value& index, size_t item_rank);

  ModuleBuilder& module_;
  std::string name_;
  Writer instructions_;
  std::vector<Shape> parameters_;
};

}  // namespace scan_hlo
