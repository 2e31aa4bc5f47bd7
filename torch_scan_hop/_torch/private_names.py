"""The private names of torch that each capability needs, of torch 2.9 to 2.15.

Written by ``python tests/private_names.py``, once on each of these; ``forms`` reads it.
"""

VERSIONS = "2.9 to 2.15"
CHECKED = "2.9.1 2.13.0 2.15.0"

#: what some versions have not, and which have it: its shim looks first
ONLY_IN: dict[str, str] = {
    "torch._dynamo.variables.dicts.SetVariable": "2.9.1 2.13.0",
    "torch._dynamo.variables.hashable.HashableTracker": "2.13.0 2.15.0",
    "torch._dynamo.variables.hashable.HashableTracker.__init__": "2.13.0 2.15.0",
    "torch._dynamo.variables.sets.SetVariable": "2.13.0 2.15.0",
    "torch._dynamo.variables.tensor.TensorVariable.nb_index_impl": "2.13.0 2.15.0",
    "torch._inductor.codegen.triton.TritonKernelOverrides.value_expr": "2.13.0 2.15.0",
    "torch._inductor.codegen.wrapper.WrapperLine.codegen": "2.15.0",
    "torch._inductor.fx_utils._extract_subgraphs_and_args": "2.13.0 2.15.0",
    "torch.fx._symbolic_trace._get_is_fx_tracing": "2.15.0",
    "torch.fx._symbolic_trace._is_fx_tracing_flag": "2.9.1 2.13.0",
    "torch.fx._symbolic_trace._set_is_fx_tracing": "2.15.0",
    "torch_xla._XLAC": "2.9.1",
}

#: the names of each capability, each after the module or class that has it
NAMES: dict[str, str] = {
    "operator": (
        "torch._C: DisableTorchFunction DispatchKey _AutoDispatchBelowAutograd "
        "_ForceDispatchKeyGuard _disabled_torch_dispatch_impl _dispatch_key_parse "
        "_dispatch_tls_local_exclude_set _dispatch_tls_local_include_set _enter_dual_level "
        "_exit_dual_level _functorch _len_torch_dispatch_stack _len_torch_function_stack "
        "_set_fwd_grad_enabled _set_grad_enabled _storage_Use_Count _vmapmode_decrement_nesting "
        "_vmapmode_increment_nesting torch._C._autograd: _saved_tensors_hooks_enable "
        "_saved_tensors_hooks_is_enabled _top_saved_tensors_default_hooks "
        "_unsafe_set_version_counter torch._C._functorch: TransformType _func_decrement_nesting "
        "_grad_decrement_nesting _jvp_decrement_nesting _unwrap_for_grad _vmap_decrement_nesting "
        "_wrap_for_grad get_dynamic_layer_stack_depth get_interpreter_stack get_unwrapped "
        "is_functorch_wrapped_tensor is_legacy_batchedtensor peek_interpreter_stack "
        "pop_dynamic_layer_stack push_dynamic_layer_stack unwrap_if_dead torch._VF: _make_dual "
        "_unpack_dual torch: _add_batch_dim _as_tensor_fullprec _assert_async "
        "_from_functional_tensor _functionalize_sync _is_functional_tensor _lazy_clone "
        "_remove_batch_dim _sync _to_functional_tensor torch._decomp: get_decompositions "
        "torch._dispatch.python: enable_python_dispatcher suspend_functionalization "
        "torch._dynamo.source: ConstantSource torch._functorch._aot_autograd.functional_utils: "
        "has_data_mutation torch._functorch: eager_transforms torch._functorch.eager_transforms: "
        "JVP_NESTING torch._functorch.pyfunctorch: temporarily_clear_interpreter_stack "
        "torch._functorch.utils: enable_single_level_autograd_function torch._functorch.vmap: "
        "lazy_load_decompositions restore_vmap unwrap_batched wrap_batched torch._guards: "
        "TracingContext detect_fake_mode torch._higher_order_ops: effects wrap "
        "torch._higher_order_ops.effects: has_effects torch._higher_order_ops.utils: "
        "_maybe_run_with_interpreter reenter_make_fx unique_graph_id torch._ops: "
        "HigherOrderOperator OpOverload key_extractor torch._subclasses.fake_tensor: "
        "DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode "
        "torch._subclasses.functional_tensor: CppFunctionalizeAPI FunctionalTensor "
        "FunctionalTensorMode torch.amp: _enter_autocast _exit_autocast "
        "torch.autograd.forward_ad: _current_level _is_fwd_grad_enabled _set_fwd_grad_enabled "
        "torch.autograd.function: _SingleLevelFunction torch.compiler: _is_exporting_flag "
        "torch.nn.utils.stateless: _reparametrize_module torch.ops.aten._linalg_check_errors: "
        "default torch.overrides: _get_current_function_mode_stack torch.utils._device: "
        "DeviceContext torch.utils._python_dispatch: TorchDispatchMode _disable_current_modes "
        "_get_current_dispatch_mode _get_current_dispatch_mode_stack _pop_mode_temporarily "
        "is_in_torch_dispatch_mode torch.utils._sympy.interp: sympy_interp "
        "torch.utils._sympy.printers: PythonPrinter torch.utils._sympy.reference: "
        "PythonReferenceAnalysis torch.utils.checkpoint: _CachedTorchDispatchMode "
        "_CachingTorchDispatchMode _StopRecomputationError"
    ),
    "capture": (
        "torch._C._autograd: _get_data_attr torch._C._dynamo.guards: GuardManager "
        "torch._C._functorch: peek_interpreter_stack torch._C: _len_torch_dispatch_stack "
        "_set_grad_enabled torch._dynamo.backends.debugging: "
        "make_eager_backend_with_torch_function_modes torch._dynamo: bytecode_transformation "
        "config run symbolic_convert torch._dynamo.convert_frame: compile_lock torch._dynamo.exc: "
        "BackendCompilerFailed FailOnRecompileLimitHit ObservedAttributeError ObservedException "
        "TorchDynamoException UncapturedHigherOrderOpError Unsupported UserError UserErrorType "
        "torch._dynamo.external_utils: insert_const_values_with_mask torch._dynamo.guards: "
        "GuardBuilder install_guard torch._dynamo.output_graph: OutputGraph "
        "torch._dynamo.side_effects: SideEffects torch._dynamo.source: AttrSource ConstantSource "
        "GlobalSource GlobalStateSource TypeSource torch._dynamo.symbolic_convert: "
        "InliningInstructionTranslator InstructionTranslator compare_op_handlers "
        "torch._dynamo.utils: guard_failures torch._dynamo.variables: RemovableHandleVariable "
        "base builder dicts higher_order_ops torch torch._dynamo.variables.base: "
        "AttributeMutationExisting AttributeMutationNew ValueMutationExisting ValueMutationNew "
        "VariableTracker is_side_effect_safe torch._dynamo.variables.builder: SourcelessBuilder "
        "VariableBuilder is_int_specialization_case wrap_fx_proxy "
        "torch._dynamo.variables.builtin: BuiltinVariable torch._dynamo.variables.constant: "
        "ConstantVariable torch._dynamo.variables.dicts: ConstDictVariable SetVariable "
        "torch._dynamo.variables.functions: UserFunctionVariable UserMethodVariable "
        "torch._dynamo.variables.hashable: HashableTracker "
        "torch._dynamo.variables.higher_order_ops: TorchHigherOrderOperatorVariable "
        "_hop_name_to_variable_class _make_inlined discard_graph_changes make_attr "
        "speculate_subgraph torch._dynamo.variables.lazy: LazyVariableTracker "
        "torch._dynamo.variables.lists: BaseListVariable DequeVariable ListVariable RangeVariable "
        "SliceVariable TupleVariable torch._dynamo.variables.misc: "
        "AutogradFunctionContextVariable AutogradFunctionVariable CellVariable DeletedVariable "
        "GetAttrVariable NewGlobalVariable NumpyVariable PythonModuleVariable "
        "StringFormatVariable get_np_to_tnp_map torch._dynamo.variables.nn_module: "
        "UnspecializedNNModuleVariable torch._dynamo.variables.sets: SetVariable "
        "torch._dynamo.variables.tensor: NumpyNdarrayVariable SymNodeVariable TensorVariable "
        "torch._dynamo.variables.torch: TorchCtxManagerClassVariable TorchInGraphFunctionVariable "
        "get_overridable_functions torch._dynamo.variables.user_defined: UserDefinedClassVariable "
        "UserDefinedObjectVariable torch._export.non_strict_utils: _NonStrictTorchFunctionHandler "
        "torch._functorch._aot_autograd: utils torch._functorch._aot_autograd.utils: __name__ "
        "torch._guards: Guard TracingContext torch._subclasses.fake_tensor: "
        "DataDependentOutputException FakeTensor torch._subclasses.meta_utils: "
        "MetaTensorDescriber torch.autograd.grad_mode: _enter_inference_mode _exit_inference_mode "
        "torch.fx._lazy_graph_module: _LazyGraphModule torch.fx._symbolic_trace: "
        "_get_is_fx_tracing _is_fx_tracing_flag _set_is_fx_tracing torch.nn.modules.module: "
        "_global_buffer_registration_hooks torch.overrides: _get_current_function_mode_stack "
        "_len_torch_function_stack _pop_mode _push_mode torch.utils._device: DeviceContext "
        "_device_constructors torch.utils: _python_dispatch torch.utils._python_dispatch: "
        "_disable_current_modes torch.utils._sympy.interp: sympy_interp "
        "torch.utils._sympy.printers: PythonPrinter torch.utils._sympy.reference: "
        "PythonReferenceAnalysis"
    ),
    "own_scan": (
        "torch._C._dynamo.eval_frame: reset_code torch._dynamo.exc: UncapturedHigherOrderOpError "
        "torch._dynamo.variables.base: VariableTracker torch._dynamo.variables: higher_order_ops "
        "torch._dynamo.variables.higher_order_ops: _call_function_and_unflatten_output "
        "check_meta_consistency_vt torch._dynamo.variables.lists: BaseListVariable "
        "torch._higher_order_ops: auto_functionalize torch._higher_order_ops.scan: scan_op"
    ),
    "counted_loop": (
        "torch._dispatch.python: enable_python_dispatcher torch._guards: detect_fake_mode "
        "torch._inductor.codegen.common: OptimizationContext torch._inductor.codegen.cpp: "
        "KernelGroup torch._inductor.codegen: wrapper torch._inductor.codegen.wrapper: "
        "AllocateLine EnterSubgraphLine ExitSubgraphLine FreeIfNotReusedLine PythonWrapperCodegen "
        "WrapperLine torch._inductor: config fx_utils ir torch._inductor.config: fallback_random "
        "patch torch._inductor.config.triton: cudagraphs torch._inductor.decomposition: "
        "select_decomp_table torch._inductor.dependencies: StarDep WeakDep "
        "torch._inductor.fx_passes: post_grad torch._inductor.fx_passes.post_grad: "
        "decompose_scan_to_while_loop torch._inductor.graph: GraphLowering torch._inductor.ir: "
        "BaseView ComputedBuffer ExternKernel FixedLayout FlexibleLayout IRNode InputBuffer "
        "MultiOutput MultiOutputLayout MutationOutput NoneLayout Pointwise ReinterpretView "
        "ShapeAsConstantBuffer StorageBox Subgraph TensorBox as_storage_and_layout "
        "torch._inductor.ir.FlexibleLayout: contiguous_strides torch._inductor.ir.Pointwise: "
        "create torch._inductor.lowering: fallback_handler register_lowering "
        "torch._inductor.ops_handler: WrapperHandler torch._inductor.scheduler: SchedulerNode "
        "torch._inductor.subgraph_lowering: PointwiseSubgraphLowering SubgraphLoweringException "
        "torch._inductor.virtualized: V ops torch.utils._ordered_set: OrderedSet "
        "torch.utils._sympy.functions: Max Min torch.utils._sympy.value_ranges: ValueRanges "
        "bound_sympy"
    ),
    "vectors_of_bools": (
        "torch._inductor.codegen.cpp: CppVecKernel torch._inductor.codegen.cpp_utils: cexpr_index "
        "torch._inductor.utils: IndentedBuffer"
    ),
    "cpu_kernels": (
        "torch._inductor.codegen.cpp: CppKernel CppKernelProxy CppScheduling CppVecKernel "
        "LoopLevel LoopNest ParallelDepth WorkSharing torch._inductor.codegen.cpp_utils: "
        "DTYPE_TO_CPP LocalBufferContext cexpr_index torch._inductor.cpu_vec_isa: pick_vec_isa "
        "torch._inductor.lowering: permute torch._inductor.mkldnn_ir: LinearUnary "
        "torch._inductor.runtime.cache_dir_utils: cache_dir torch._inductor.utils: Placeholder "
        "parallel_num_threads torch.ops.mkldnn: _linear_pointwise torch.utils._sympy.functions: "
        "CeilDiv"
    ),
    "gpu_kernels": (
        "torch._inductor.codecache: PyCodeCache torch._inductor.codegen.common: Kernel "
        "torch._inductor.codegen.triton: TritonCSE TritonCSEVariable TritonKernelOverrides texpr "
        "triton_type torch._inductor.ir: Reduction torch._inductor.ir.Reduction: create "
        "torch._inductor.utils: IndentedBuffer"
    ),
    "sharding": (
        "torch._functorch.compile_utils: fx_graph_cse torch.distributed.tensor._dtensor_spec: "
        "DTensorSpec TensorMeta torch.distributed.tensor._redistribute: redistribute_local_tensor "
        "torch.ops: _c10d_functional"
    ),
    "xla": (
        "torch._C.DispatchKey: AutogradXLA Functionalize torch._C: _DisableAutocast "
        "_ForceDispatchKeyGuard _dispatch_get_registrations_for_dispatch_key "
        "_dispatch_has_kernel_for_dispatch_key _dispatch_tls_local_exclude_set "
        "_dispatch_tls_local_include_set torch: _is_functional_tensor _to_functional_tensor "
        "torch._subclasses.fake_tensor: FakeTensor torch._subclasses.meta_utils: "
        "MetaTensorDescriber torch_xla: _XLAC"
    ),
    "explain": (
        "torch._dynamo.exc: TensorifyScalarRestartAnalysis torch._dynamo.symbolic_convert: "
        "TensorifyState torch._functorch.aot_autograd: aot_module_simplified torch._functorch: "
        "config torch._functorch.config: patch torch._functorch.partitioners: "
        "min_cut_rematerialization_partition torch._guards: TracingContext detect_fake_mode "
        "tracing torch._inductor.codecache: PyCodeCache torch._inductor.compile_fx: "
        "_recursive_joint_graph_passes compile_fx_inner torch._inductor: config "
        "torch._inductor.config: patch torch._inductor.decomposition: select_decomp_table "
        "torch._inductor.graph: GraphLowering torch._inductor.virtualized: V"
    ),
    "absent_gpu": (
        "torch._C: __file__ _dispatch_has_kernel_for_dispatch_key torch._C._autograd: DeviceType "
        "torch._inductor.fx_passes.joint_graph: UniformValueConstantFolder "
        "torch._subclasses.meta_utils: MetaTensorDescriber torch.autograd: _engine_run_backward "
        "torch.library: _scoped_library"
    ),
}

#: how each is called, and the parameters of each that is patched or overridden; see ``forms``
FORMS = """
torch: _as_tensor_fullprec(t) _sync(t)
torch._decomp: get_decompositions(aten_ops)
torch._dispatch.python: suspend_functionalization(())
torch._dynamo.backends.debugging: make_eager_backend_with_torch_function_modes(modes)
torch._dynamo.config: patch(allow_rnn=; capture_scalar_outputs=;
    skip_guards_on_constant_func_defaults=)
torch._dynamo.exc: UncapturedHigherOrderOpError(msg; msg real_stack) Unsupported(msg)
torch._dynamo.guards: install_guard(_)
torch._dynamo.output_graph.OutputGraph: create_proxy(self _ _ _ _) get_submodule(self keys)
    install_global_by_id(self prefix value) install_subgraph(self name sub_gm)
torch._dynamo: run(fn)
torch._dynamo.side_effects.SideEffects: _get_modified_vars(self)[self]
    check_allowed_side_effect(self item)[self item] clone(self) load_attr(self item name ...)[self
    item name deleted_ok check] mutation(self var) store_attr(self item name ...; self item name
    value ...)[self item name value; self item name value mutation_kind; self item name value
    mutation_kind mutated_source]
torch._dynamo.source: AttrSource(base member) ConstantSource(source_name) GlobalSource(global_name)
    GlobalStateSource(()) TypeSource(base)
torch._dynamo.symbolic_convert.InliningInstructionTranslator: build_inline_tracer(parent func args
    ...)[parent func args kwargs; parent func args kwargs allow_nested_graph_breaks]
torch._dynamo.symbolic_convert.InstructionTranslator: current_tx(())
torch._dynamo.symbolic_convert.TensorifyState: clear(())
torch._dynamo.utils.guard_failures: get(key; key default)
torch._dynamo.variables.RemovableHandleVariable: call_method[self tx method_name args kwargs; self
    tx name args kwargs]
torch._dynamo.variables.base: ValueMutationNew(()) is_side_effect_safe(m)
torch._dynamo.variables.base.VariableTracker: as_proxy(self) as_python_constant(self) build(tx
    value; tx value source) call_function[self tx args kwargs] clone(self requires_grad=)
    is_python_constant(self) is_realized(self) python_type(self) realize(self)
    unpack_var_sequence(self tx)
torch._dynamo.variables.builder.SourcelessBuilder: create(tx value)
torch._dynamo.variables.builder.VariableBuilder: _wrap(self value)[self value] wrap_symfloat(self
    value)[self value]
torch._dynamo.variables.builder: is_int_specialization_case(value source)[value source]
    wrap_fx_proxy(proxy= tx=)
torch._dynamo.variables.builtin: BuiltinVariable(fn)
torch._dynamo.variables.builtin.BuiltinVariable: _handle_insert_op_in_graph[self tx args kwargs]
    call_function(self tx args kwargs)[self tx args kwargs]
torch._dynamo.variables.constant.ConstantVariable: create(value)
torch._dynamo.variables.functions: UserFunctionVariable(fn source=)
torch._dynamo.variables.functions.UserFunctionVariable: call_function(self tx args kwargs)[self tx
    args kwargs]
torch._dynamo.variables.functions.UserMethodVariable: call_obj_hasattr(self tx name)[self tx name]
torch._dynamo.variables.hashable.HashableTracker: __init__(self vt)[self vt]
torch._dynamo.variables.higher_order_ops.TorchHigherOrderOperatorVariable: _call_function[self tx
    args kwargs] call_function[self tx args kwargs]
torch._dynamo.variables.higher_order_ops: _call_function_and_unflatten_output(tx fn args ...)[tx fn
    args kwargs flat_example_value ret_spec; tx fn args kwargs flat_example_value ret_spec body_r]
    _make_inlined(tx f) check_meta_consistency_vt(vars1 vars2 lhs_name rhs_name include_contiguity=)
    discard_graph_changes(tx) make_attr(tx name) speculate_subgraph(tx f sub_args sub_kwargs
    description restore_side_effects= set_subgraph_inputs= should_flatten_outputs= source_target=
    supports_aliasing= supports_input_mutation= ...; tx f sub_args sub_kwargs description
    restore_side_effects= set_subgraph_inputs= source_target= supports_aliasing=
    supports_input_mutation=)
torch._dynamo.variables.lazy.LazyVariableTracker: realize_all(value)
torch._dynamo.variables.lists.DequeVariable: call_method(self tx name args kwargs)[self tx name args
    kwargs]
torch._dynamo.variables.lists: ListVariable(items; items mutation_type=) TupleVariable(items)
torch._dynamo.variables.lists.RangeVariable: range_count(self x)[self x]
torch._dynamo.variables.lists.SliceVariable: __init__(self items ...)[self items kwargs; self items
    tx kwargs]
torch._dynamo.variables.misc.AutogradFunctionVariable: call_apply(self tx args kwargs)[self tx args
    kwargs]
torch._dynamo.variables.misc.GetAttrVariable: call_function(self tx args kwargs)[self tx args
    kwargs] create_getattr_proxy(base_proxy attr)[base_proxy attr]
torch._dynamo.variables.misc.NumpyVariable: call_function[self tx args kwargs]
torch._dynamo.variables.misc.StringFormatVariable: as_python_constant[self]
torch._dynamo.variables.misc: get_np_to_tnp_map(())
torch._dynamo.variables.tensor.NumpyNdarrayVariable: call_method[self tx name args kwargs]
    unpack_var_sequence[self tx idxes]
torch._dynamo.variables.tensor.TensorVariable: _method_register_hook[self name hook; self tx name
    hook] as_python_constant(self)[self] call_method(self tx name ...)[self tx name args kwargs]
    call_obj_hasattr(self tx name)[self tx name] method_attr_grad_fn(self tx)[self tx]
    nb_index_impl(self tx)[self tx]
torch._dynamo.variables.torch.TorchCtxManagerClassVariable: call_function(self tx ...)[self tx args
    kwargs]
torch._dynamo.variables.torch.TorchInGraphFunctionVariable: call_function(self tx ...; self tx args
    kwargs)[self tx args kwargs]
torch._dynamo.variables.torch: get_overridable_functions(())[]
torch._dynamo.variables.user_defined.UserDefinedObjectVariable: method_setattr_standard(self tx name
    value ...)[self tx name value; self tx name value directly_update_dict]
torch._functorch._aot_autograd.functional_utils: has_data_mutation(t)
torch._functorch.aot_autograd: aot_module_simplified(mod args bw_compiler= decompositions=
    fw_compiler= inference_compiler= keep_inference_input_mutations= partition_fn=)
torch._functorch.compile_utils: fx_graph_cse(fx_g)
torch._functorch.config: patch(unlift_effect_tokens=)
torch._functorch.partitioners: min_cut_rematerialization_partition(joint_module _joint_inputs ...)
torch._functorch.pyfunctorch: temporarily_clear_interpreter_stack(())
torch._functorch.utils: enable_single_level_autograd_function(())
torch._functorch.vmap: lazy_load_decompositions(()) restore_vmap(func in_dims batch_size randomness)
    unwrap_batched(args level) wrap_batched(args bdims level)
torch._guards: TracingContext(fake_mode) detect_fake_mode(()|inputs) tracing(context)
torch._guards.TracingContext: extract_stack(()) get(()) try_get(())
torch._higher_order_ops.effects: has_effects(op ...)[op; op args kwargs]
torch._higher_order_ops.utils: _maybe_run_with_interpreter(fn) reenter_make_fx(fn)
    unique_graph_id(proxy_mode prefix=)
torch._inductor.codecache.PyCodeCache: load(source_code)
torch._inductor.codegen.common: OptimizationContext(())
torch._inductor.codegen.cpp: CppKernel(args num_threads) KernelGroup(()) LoopLevel(var size; var
    size is_reduction= offset=) ParallelDepth(parallel_depth= start_depth=) WorkSharing(code)
torch._inductor.codegen.cpp.CppKernelProxy: size_hint[self]
torch._inductor.codegen.cpp.CppScheduling: __new__(_) define_kernel(self src_code nodes kernel_args)
torch._inductor.codegen.cpp.CppVecKernel: _get_store_line(self value var index dtype ...)[self value
    var index dtype accu_store] _get_vec_load_line(self var index dtype ...)[self var index dtype
    load_mask] _load_or_store_non_contiguous[self var index dtype buffer store_value accu_store]
torch._inductor.codegen.cpp.KernelGroup: codegen_group(self ...)[self name]
torch._inductor.codegen.cpp.LoopLevel: lines[self]
torch._inductor.codegen.cpp.LoopNest: build(kernel) max_parallel_depth[self]
torch._inductor.codegen.cpp.WorkSharing: parallel[self threads]
torch._inductor.codegen.cpp_utils: LocalBufferContext(kernel_args) cexpr_index(index)
torch._inductor.codegen.triton: TritonCSE(_|prefix _|suffix) texpr(expr) triton_type(dtype)
torch._inductor.codegen.triton.TritonCSEVariable: update_on_args[self name args kwargs]
torch._inductor.codegen.triton.TritonKernelOverrides: constant[value dtype] index_expr[expr dtype]
    indirect_indexing[self var size check wrap_neg] masked[mask body other] value_expr[expr dtype]
torch._inductor.codegen.wrapper: EnterSubgraphLine(wrapper graph) ExitSubgraphLine(wrapper)
torch._inductor.codegen.wrapper.PythonWrapperCodegen: codegen_sizevar(self x) define_kernel(self
    kernel_name kernel_body gpu= metadata=) next_kernel_suffix(self) pop_codegened_graph(self)
    push_codegened_graph(self graph) writeline(self line)
torch._inductor.codegen.wrapper.WrapperLine: codegen[self code] codegen_fx[self converter]
torch._inductor.compile_fx: _recursive_joint_graph_passes(gm) compile_fx_inner(gm example_inputs
    is_backward= is_inference=)
torch._inductor.config: patch(arg1; fx_graph_cache= fx_graph_remote_cache=; graph_partition=;
    inplace_buffers=; realize_acc_reads_threshold= realize_opcount_threshold=
    realize_reads_threshold=)
torch._inductor.cpu_vec_isa: pick_vec_isa(())
torch._inductor.decomposition: select_decomp_table(())
torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder: _deduce_value[self node]
torch._inductor.fx_passes.post_grad: decompose_auto_functionalized[graph]
    decompose_scan_to_while_loop(gm)[gm] decompose_triton_kernel_wrapper_functional[graph]
    reinplace_inplaceable_ops[fake_tensor_updater graph]
torch._inductor.fx_utils: _extract_subgraphs_and_args[node valid_subgraphs args kwargs]
torch._inductor.graph.GraphLowering: codegen(self)[self] get_buffer(self buffer_name) get_dtype(self
    buffer_name) make_subgraph(self example_inputs= gm= subgraph_name=) register_buffer(self buffer)
    register_operation(self op) set_current_device(self device)
torch._inductor.ir.ExternKernel: codegen[self wrapper] realize_input(x) require_contiguous(x)
    require_exact_strides(x exact_strides allow_padding=) should_allocate[self]
torch._inductor.ir: FixedLayout(device dtype size; device dtype size stride; device dtype size
    stride offset; device= dtype= size= stride=) InputBuffer(layout= name=)
    MultiOutputLayout(device=) MutationOutput(layout mutated_node mutating_node) NoneLayout(device=)
    ReinterpretView(data= layout=) StorageBox(data) Subgraph(graph_module= name=) TensorBox(data)
    as_storage_and_layout(x freeze=)
torch._inductor.ir.FlexibleLayout: contiguous_strides(sizes)
torch._inductor.ir.MultiOutput: codegen[self wrapper]
torch._inductor.ir.Pointwise: create(device= dtype= inner_fn= ranges=)
torch._inductor.ir.Reduction: create(...)[device dst_dtype src_dtype inner_fn ranges
    reduction_ranges reduction_type reduction_hint input_node; device dst_dtype src_dtype inner_fn
    ranges reduction_ranges reduction_type reduction_hint input_node strict_reduction]
torch._inductor.ir.StorageBox: realize[self] should_realize_on_reuse[self users; self users
    graph_reuse]
torch._inductor.ir.TensorBox: create(data)
torch._inductor.lowering: fallback_handler(kernel add_to_fallback_set=) permute(x dims)
    register_lowering(aten_fn type_promotion_kind=)
torch._inductor.mkldnn_ir: LinearUnary(layout inputs constant_args)
torch._inductor.ops_handler.WrapperHandler: _default[self name args kwargs] index_expr[self expr
    dtype] load[self name index] masked[self mask body other]
torch._inductor.runtime.cache_dir_utils: cache_dir(())
torch._inductor.scheduler.SchedulerNode: recompute_size_and_body(self ...)[self
    extra_indexing_constraints recompute_sizes_body_func]
torch._inductor.subgraph_lowering.PointwiseSubgraphLowering: call_function[self target args kwargs]
    register_buffer[self buffer set_name] run_node[self n]
torch._inductor.utils: IndentedBuffer(()) parallel_num_threads(())
torch._inductor.virtualized.V: MockHandler(()) set_fake_mode(value) set_graph_handler(value)
    set_interpreter_handler(value) set_ops_handler(value)
torch._inductor.virtualized.V.ops: constant(value dtype) logical_and(x0 x1) where(condition input
    other)
torch._inductor.virtualized.ops: and_(x0 x1) constant(value dtype) eq(x0 x1) ge(x0 x1)
    index_expr(expr dtype) load(name index) lt(x0 x1) mul(x0 x1) store(_ _ _) where(condition input
    other)
torch._ops.HigherOrderOperator: dispatch[self dispatch_key args kwargs] gen_schema[self args kwargs]
torch._ops: key_extractor(tensors key_mask)
torch._subclasses.fake_tensor.FakeTensor: __new__(cls fake_mode|fake_mode_or_elem elem device
    ...)[cls fake_mode elem device constant real_tensor pytype dispatch_keys; cls fake_mode_or_elem
    elem device constant real_tensor pytype dispatch_keys fake_mode fake_device _fake_device
    requires_grad _is_param state]
torch._subclasses.fake_tensor: FakeTensorMode((); allow_non_fake_inputs=; allow_non_fake_inputs=
    shape_env=)
torch._subclasses.functional_tensor.FunctionalTensor: to_functional(x)
torch._subclasses.functional_tensor: FunctionalTensorMode(())
torch._subclasses.meta_utils.MetaTensorDescriber: describe_tensor(self t ...)[self t recurse trace]
torch.autograd: _engine_run_backward(t_outputs _; t_outputs _ _ _ _ ...)[t_outputs args kwargs]
torch.autograd.forward_ad: _set_fwd_grad_enabled(mode)
torch.autograd.function._SingleLevelFunction: backward[ctx grad_outputs] forward[args kwargs]
    setup_context[ctx inputs output]
torch.distributed.tensor._dtensor_spec: DTensorSpec(mesh placements tensor_meta=) TensorMeta(shape
    stride dtype)
torch.distributed.tensor._redistribute: redistribute_local_tensor(local_tensor current_spec
    target_spec)
torch.fx._lazy_graph_module._LazyGraphModule: force_recompile(gm)
torch.fx._symbolic_trace: _get_is_fx_tracing(()) _set_is_fx_tracing(value)
torch.library: _scoped_library(_ _)
torch.nn.utils.stateless: _reparametrize_module(module parameters_and_buffers tie_weights=)
torch.ops.aten._linalg_check_errors: default(_ _ is_matrix=)
torch.ops.aten._linalg_det: default(_)
torch.ops.mkldnn: _linear_pointwise(_ _ _ _ _ _)
torch.overrides: _get_current_function_mode_stack(()) _pop_mode(()) _push_mode(mode)
torch.utils._device: _device_constructors(())
torch.utils._ordered_set: OrderedSet(iterable)
torch.utils._python_dispatch.TorchDispatchMode: __torch_dispatch__[self func types args kwargs]
torch.utils._python_dispatch: _disable_current_modes(()) _get_current_dispatch_mode(())
    _get_current_dispatch_mode_stack(()) _pop_mode_temporarily(())
    is_in_torch_dispatch_mode(include_infra_modes=)
torch.utils._sympy.functions: CeilDiv(_ _) Max(_ _) Min(_ _)
torch.utils._sympy.interp: sympy_interp(analysis env expr)
torch.utils._sympy.printers.PythonPrinter: _print_Float[self expr]
torch.utils._sympy.reference.PythonReferenceAnalysis: int_truediv[a b]
torch.utils._sympy.value_ranges: ValueRanges(lower upper) bound_sympy(expr ranges)
torch.utils._sympy.value_ranges.ValueRanges: unknown(())
"""
