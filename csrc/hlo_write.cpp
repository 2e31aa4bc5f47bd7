// Writing: shapes, instructions, computations, modules.
#include <limits>
#include <stdexcept>

#include "hlo.h"

namespace scan_hlo {
namespace {

const char* element_type_name(int64_t type) {
  switch (type) {
    case 1: return "pred";
    case 2: return "s8";
    case 3: return "s16";
    case 4: return "s32";
    case 5: return "s64";
    case 6: return "u8";
    case 7: return "u16";
    case 8: return "u32";
    case 9: return "u64";
    case 10: return "f16";
    case 11: return "f32";
    case 12: return "f64";
    case 15: return "c64";
    case 16: return "bf16";
    case 18: return "c128";
    default: return nullptr;
  }
}

std::vector<int64_t> with_leading(int64_t first, const std::vector<int64_t>& rest) {
  std::vector<int64_t> all{first};
  all.insert(all.end(), rest.begin(), rest.end());
  return all;
}

std::vector<int64_t> ids_of(const std::vector<Value>& values) {
  std::vector<int64_t> ids;
  for (const Value& value : values) ids.push_back(value.id);
  return ids;
}

std::vector<int64_t> without_leading(const std::vector<int64_t>& dims) {
  return {dims.begin() + 1, dims.end()};
}

}  // namespace

bool Shape::operator==(const Shape& other) const {
  return element_type == other.element_type && dims == other.dims && elements == other.elements;
}

std::string Shape::str() const {
  const char* name = element_type_name(element_type);
  std::string text = name ? name : "type" + std::to_string(element_type);
  text += '[';
  for (size_t k = 0; k < dims.size(); ++k) text += (k ? "," : "") + std::to_string(dims[k]);
  return text + ']';
}

std::string Shape::encode() const {
  Writer shape;
  shape.integer(shape_field::kElementType, element_type);
  if (is_tuple()) {
    for (const Shape& element : elements) shape.bytes(shape_field::kTupleShapes, element.encode());
    return shape.str();
  }
  std::vector<int64_t> minor_to_major;
  for (size_t k = dims.size(); k-- > 0;) minor_to_major.push_back(static_cast<int64_t>(k));
  Writer layout;
  layout.integers(layout_field::kMinorToMajor, minor_to_major);
  return shape.integers(shape_field::kDimensions, dims).bytes(shape_field::kLayout, layout.str()).str();
}

Shape scalar(int64_t element_type) { return Shape{element_type, {}, {}}; }

Shape tuple_of(std::vector<Shape> elements) { return Shape{kTuple, {}, std::move(elements)}; }

void check_size(const Shape& shape, const std::string& what) {
  // No element type is wider than 16 bytes. Empty dimensions do not excuse the
  // others: XLA multiplies strides as well.
  constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max() / 16;
  int64_t count = 1;
  for (int64_t size : shape.dims) {
    if (size > 0 && count > kMaxElements / size) throw InputError(what + " is too large: " + shape.str());
    if (size > 0) count *= size;
  }
}

Shape stacked(const Shape& shape, int64_t count) {
  Shape result{shape.element_type, with_leading(count, shape.dims), {}};
  check_size(result, std::to_string(count) + " steps of " + shape.str());
  return result;
}

std::string encode_program_shape(const std::vector<Shape>& parameters, const Shape& result) {
  Writer program;
  for (const Shape& parameter : parameters) program.bytes(program_shape_field::kParameters, parameter.encode());
  program.bytes(program_shape_field::kResult, result.encode());
  // XLA requires as many names as there are parameters.
  for (size_t k = 0; k < parameters.size(); ++k) {
    program.bytes(program_shape_field::kParameterNames, "p" + std::to_string(k));
  }
  return program.str();
}

// The computations we start from are copied byte for byte: whatever XLA put
// there (metadata, shardings, fields we do not know) survives.
ModuleBuilder::ModuleBuilder(const ModuleView& base) : last_id_(base.last_used_id()) {
  for (const ComputationView& computation : base.computations) add_computation(computation.message);
}

int64_t ModuleBuilder::next_id() {
  if (last_id_ >= std::numeric_limits<int32_t>::max()) throw InputError("the body leaves no HLO id free");
  return ++last_id_;
}

void ModuleBuilder::add_computation(std::string_view message) {
  computations_.bytes(module_field::kComputations, message);
}

std::string ModuleBuilder::finish(const std::string& name, int64_t entry_id,
                                  std::string_view program_shape) const {
  const std::string entry_name = name + "." + std::to_string(entry_id);
  Writer module;
  module.bytes(module_field::kName, entry_name).bytes(module_field::kEntryName, entry_name);
  module.append(computations_).bytes(module_field::kHostProgramShape, program_shape);
  return module.integer(module_field::kId, entry_id).integer(module_field::kEntryId, entry_id).str();
}

Value ComputationBuilder::instruction(std::string_view opcode, const Shape& shape,
                                      const std::vector<int64_t>& operands, const Writer& attributes) {
  const int64_t id = module_.next_id();
  Writer message;
  message.bytes(instruction_field::kName, std::string(opcode) + "." + std::to_string(id));
  message.bytes(instruction_field::kOpcode, opcode).bytes(instruction_field::kShape, shape.encode());
  message.append(attributes).integer(instruction_field::kId, id);
  message.integers(instruction_field::kOperands, operands);
  instructions_.bytes(computation_field::kInstructions, message.str());
  return {id, shape};
}

Value ComputationBuilder::parameter(const Shape& shape) {
  Writer number;
  number.integer(instruction_field::kParameterNumber, static_cast<int64_t>(parameters_.size()));
  parameters_.push_back(shape);
  return instruction("parameter", shape, {}, number);
}

Value ComputationBuilder::constant_s32(int64_t value) {
  const Shape shape = scalar(kS32);
  Writer literal, attribute;
  literal.bytes(literal_field::kShape, shape.encode()).integers(literal_field::kS32s, {value});
  attribute.bytes(instruction_field::kLiteral, literal.str());
  return instruction("constant", shape, {}, attribute);
}

Value ComputationBuilder::zeros(const Shape& shape) {
  // A converted s32 zero spares us the literal encoding of every element type.
  Value zero = constant_s32(0);
  if (shape.element_type != kS32) zero = instruction("convert", scalar(shape.element_type), {zero.id});
  return instruction("broadcast", shape, {zero.id});
}

Value ComputationBuilder::element(const Value& tuple, size_t index) {
  Writer attribute;
  attribute.integer(instruction_field::kTupleIndex, static_cast<int64_t>(index));
  return instruction("get-tuple-element", tuple.shape.elements.at(index), {tuple.id}, attribute);
}

Value ComputationBuilder::tuple(const std::vector<Value>& values) {
  std::vector<Shape> shapes;
  for (const Value& value : values) shapes.push_back(value.shape);
  return instruction("tuple", tuple_of(std::move(shapes)), ids_of(values));
}

Value ComputationBuilder::reshape(const Value& value, const Shape& shape) {
  return instruction("reshape", shape, {value.id});
}

Value ComputationBuilder::add(const Value& left, const Value& right) {
  return instruction("add", left.shape, {left.id, right.id});
}

Value ComputationBuilder::subtract(const Value& left, const Value& right) {
  return instruction("subtract", left.shape, {left.id, right.id});
}

Value ComputationBuilder::less_than(const Value& left, const Value& right) {
  Writer attributes;
  attributes.bytes(instruction_field::kComparisonDirection, "LT");
  attributes.bytes(instruction_field::kComparisonType, "SIGNED");
  return instruction("compare", scalar(kPred), {left.id, right.id}, attributes);
}

Value ComputationBuilder::call(int64_t computation, const Shape& result, const std::vector<Value>& arguments) {
  Writer attributes;
  attributes.integers(instruction_field::kCalled, {computation});
  return instruction("call", result, ids_of(arguments), attributes);
}

Value ComputationBuilder::while_loop(const Value& state, int64_t body, int64_t condition, int64_t trip_count) {
  Writer attributes;
  const std::string count = std::to_string(trip_count);
  attributes.bytes(instruction_field::kBackendConfig, "{\"known_trip_count\":{\"n\":\"" + count + "\"}}");
  attributes.integers(instruction_field::kCalled, {body, condition});
  return instruction("while", state.shape, {state.id}, attributes);
}

Value ComputationBuilder::read_row(const Value& source, const Value& index) {
  const Shape item{source.shape.element_type, without_leading(source.shape.dims), {}};
  const Shape row{item.element_type, with_leading(1, item.dims), {}};
  std::vector<int64_t> operands{source.id};
  append_row_start(operands, index, item.dims.size());
  Writer sizes;
  sizes.integers(instruction_field::kDynamicSliceSizes, row.dims);
  return reshape(instruction("dynamic-slice", row, operands, sizes), item);
}

Value ComputationBuilder::write_row(const Value& source, const Value& item, const Value& index) {
  const Shape row{item.shape.element_type, with_leading(1, item.shape.dims), {}};
  std::vector<int64_t> operands{source.id, reshape(item, row).id};
  append_row_start(operands, index, item.shape.dims.size());
  return instruction("dynamic-update-slice", source.shape, operands);
}

// The start indices (index, 0, 0, ...) are one scalar operand per dimension.
void ComputationBuilder::append_row_start(std::vector<int64_t>& operands, const Value& index, size_t item_rank) {
  operands.push_back(index.id);
  if (item_rank > 0) operands.resize(operands.size() + item_rank, constant_s32(0).id);
}

int64_t ComputationBuilder::finish(const Value& root) {
  const int64_t id = module_.next_id();
  Writer message;
  message.bytes(computation_field::kName, name_ + "." + std::to_string(id)).append(instructions_);
  message.bytes(computation_field::kProgramShape, encode_program_shape(parameters_, root.shape));
  message.integer(computation_field::kId, id).integer(computation_field::kRootId, root.id);
  module_.add_computation(message.str());
  return id;
}

}  // namespace scan_hlo
