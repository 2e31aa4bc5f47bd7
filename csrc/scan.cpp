#include "scan.h"

#include <limits>

#include "hlo.h"

namespace scan_hlo {
namespace {

// The loop state is one flat tuple:
//
//   [ counter | carries... | inputs... | stacked ys... ]
//
// where inputs are the sliced and the invariant parameters, in body order. XLA's
// While has no captures: what the body reads must travel through the state.
struct Plan {
  int64_t length;
  bool reverse;
  int64_t body_entry;
  std::vector<int64_t> roles;  // of the body's parameters
  std::vector<size_t> slots;   // where each parameter of the body lives in the state
  std::vector<Shape> body_results;
  std::vector<Shape> carries, inputs, ys;

  size_t first_input() const { return 1 + carries.size(); }
  size_t first_y() const { return first_input() + inputs.size(); }
  Shape state() const {
    std::vector<Shape> all{scalar(kS32)};
    for (const auto* group : {&carries, &inputs, &ys}) all.insert(all.end(), group->begin(), group->end());
    return tuple_of(std::move(all));
  }
};

void check_spec(const ScanSpec& spec, const ProgramShape& body) {
  if (spec.name.empty()) throw InputError("name must not be empty");
  if (spec.length < 1) throw InputError("length must be at least 1, got " + std::to_string(spec.length));
  if (spec.length > std::numeric_limits<int32_t>::max()) {
    throw InputError("length must fit in 32 bits, got " + std::to_string(spec.length));
  }
  if (spec.n_carry < 0) throw InputError("n_carry must not be negative, got " + std::to_string(spec.n_carry));
  if (static_cast<uint64_t>(spec.n_carry) > body.results.size()) {
    throw InputError("n_carry is " + std::to_string(spec.n_carry) + ", but the body returns only " +
                     std::to_string(body.results.size()) + " values");
  }
  if (spec.roles.size() != body.parameters.size()) {
    throw InputError("got " + std::to_string(spec.roles.size()) + " roles for a body of " +
                     std::to_string(body.parameters.size()) + " parameters");
  }
}

// The state slot of a parameter that reads a carry.
size_t place_carry(Plan& plan, size_t parameter, int64_t carry, const Shape& shape) {
  const std::string which = "carry " + std::to_string(carry);
  if (static_cast<uint64_t>(carry) >= plan.carries.size()) {
    throw InputError("role of parameter " + std::to_string(parameter) + " is " + which + ", but there are only " +
                     std::to_string(plan.carries.size()) + " carries");
  }
  const Shape& returned = plan.carries[carry];
  if (!(returned == shape)) {
    throw InputError("the body changes " + which + " from " + shape.str() + " to " + returned.str());
  }
  return 1 + static_cast<size_t>(carry);
}

size_t place_input(Plan& plan, int64_t role, const Shape& shape) {
  plan.inputs.push_back(role == kSliced ? stacked(shape, plan.length) : shape);
  return plan.first_input() + plan.inputs.size() - 1;
}

void place_parameters(Plan& plan, const std::vector<Shape>& parameters) {
  std::vector<bool> taken(plan.carries.size(), false);
  for (size_t k = 0; k < parameters.size(); ++k) {
    const int64_t role = plan.roles[k];
    if (role < kInvariant) throw InputError("unknown role " + std::to_string(role) + " of parameter " + std::to_string(k));
    if (role < 0) {
      plan.slots.push_back(place_input(plan, role, parameters[k]));
      continue;
    }
    plan.slots.push_back(place_carry(plan, k, role, parameters[k]));
    if (taken[role]) throw InputError("two parameters have the role of carry " + std::to_string(role));
    taken[role] = true;
  }
}

Plan make_plan(const ModuleView& module, const ScanSpec& spec) {
  const ComputationView& entry = module.entry();
  const ProgramShape body = read_program_shape(entry.program_shape);
  check_spec(spec, body);
  size_t n_parameters = 0;
  for (const InstructionView& instruction : entry.instructions) n_parameters += instruction.opcode == "parameter";
  if (n_parameters != body.parameters.size()) {
    throw InputError("malformed HLO: the entry computation has " + std::to_string(n_parameters) +
                     " parameter instructions, its program shape " + std::to_string(body.parameters.size()));
  }
  Plan plan{spec.length, spec.reverse, entry.id, spec.roles, {}, body.results, {}, {}, {}};
  // Carries take their shape from the result: the body may not read all of them.
  const auto first_y = body.results.begin() + spec.n_carry;
  plan.carries.assign(body.results.begin(), first_y);
  for (auto y = first_y; y != body.results.end(); ++y) plan.ys.push_back(stacked(*y, spec.length));
  place_parameters(plan, body.parameters);
  return plan;
}

// state -> state with the counter advanced, carries replaced, one row of each y written
int64_t emit_body(ModuleBuilder& module, const Plan& plan) {
  ComputationBuilder builder(module, "scan_body");
  const Value state = builder.parameter(plan.state());
  std::vector<Value> values;
  for (size_t k = 0; k < state.shape.elements.size(); ++k) values.push_back(builder.element(state, k));
  const Value& counter = values[0];
  const Value row = plan.reverse ? builder.subtract(builder.constant_s32(plan.length - 1), counter) : counter;

  std::vector<Value> arguments;
  for (size_t k = 0; k < plan.roles.size(); ++k) {
    const Value& source = values[plan.slots[k]];
    arguments.push_back(plan.roles[k] == kSliced ? builder.read_row(source, row) : source);
  }
  const Value results = builder.call(plan.body_entry, tuple_of(plan.body_results), arguments);

  std::vector<Value> next{builder.add(counter, builder.constant_s32(1))};
  for (size_t k = 0; k < plan.carries.size(); ++k) next.push_back(builder.element(results, k));
  for (size_t k = 0; k < plan.inputs.size(); ++k) next.push_back(values[plan.first_input() + k]);
  for (size_t k = 0; k < plan.ys.size(); ++k) {
    const Value y = builder.element(results, plan.carries.size() + k);
    next.push_back(builder.write_row(values[plan.first_y() + k], y, row));
  }
  return builder.finish(builder.tuple(next));
}

// state -> counter < length
int64_t emit_condition(ModuleBuilder& module, const Plan& plan) {
  ComputationBuilder builder(module, "scan_condition");
  const Value state = builder.parameter(plan.state());
  const Value counter = builder.element(state, 0);
  return builder.finish(builder.less_than(counter, builder.constant_s32(plan.length)));
}

// (carries..., inputs...) -> (final carries..., stacked ys...)
std::string emit_entry(ModuleBuilder& module, const Plan& plan, const std::string& name, int64_t body,
                       int64_t condition) {
  ComputationBuilder builder(module, name);
  std::vector<Value> initial;
  // Parameters come first: their ids then follow the order of the arguments.
  for (const auto* group : {&plan.carries, &plan.inputs}) {
    for (const Shape& shape : *group) initial.push_back(builder.parameter(shape));
  }
  initial.insert(initial.begin(), builder.constant_s32(0));
  for (const Shape& y : plan.ys) initial.push_back(builder.zeros(y));
  const Value final_state = builder.while_loop(builder.tuple(initial), body, condition, plan.length);

  std::vector<Value> results;
  for (size_t k = 0; k < plan.carries.size(); ++k) results.push_back(builder.element(final_state, 1 + k));
  for (size_t k = 0; k < plan.ys.size(); ++k) results.push_back(builder.element(final_state, plan.first_y() + k));
  const Value root = builder.tuple(results);
  const int64_t entry = builder.finish(root);
  return module.finish(name, entry, encode_program_shape(builder.parameters(), root.shape));
}

}  // namespace

std::string assemble_scan(std::string_view body_bytes, const ScanSpec& spec) {
  const ModuleView body_module = read_module(body_bytes);
  const Plan plan = make_plan(body_module, spec);
  ModuleBuilder module(body_module);
  // XLA wants callees before callers.
  const int64_t body = emit_body(module, plan);
  const int64_t condition = emit_condition(module, plan);
  return emit_entry(module, plan, spec.name, body, condition);
}

}  // namespace scan_hlo
