"""`fulcrum plan`: shows which engines a manifest would start in a cluster, and why, before it is applied.

It only reads files and contacts no cluster. What depends on the model needs its config.json, and is left out
without it. Of a service with simulated engines only the profile's name is checked: no engine is planned.
"""

from pathlib import Path

from fulcrum_cli.commands.plan_report import ROLES, PlannedPool, ServicePlan
from fulcrum_cli.local.engine_environment import find_local_model, read_model_config
from fulcrum_cli.manifest_files import check_objects, read_manifest
from fulcrum_cli.option_values import parse_choice
from fulcrum_cli.terminal.output import OutputFormat, render_document
from fulcrum_core.api import PDPool, PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import ModelFacts
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role
from fulcrum_operator.engines.from_spec import build_launch_request
from fulcrum_operator.engines.launch import EnginePlan
from fulcrum_operator.engines.vllm import POD_PLACEMENT, plan_engine
from fulcrum_operator.plan.pools import desired_pools


def run(file: Path, *, model_config: Path | None, output: str | None) -> int:
    """Print the plan of each service of the manifest; return 1 if one cannot work, else 0.

    Raises:
        InvalidInput: for an option, the manifest or a model that breaks a rule.
    """
    output_format = None if output is None else parse_choice("--output", output, OutputFormat)
    objects = read_manifest(file)
    check_objects(objects)
    services = [obj for obj in objects if isinstance(obj, PDService)]
    if not services:
        raise InvalidInput(str(file), "no PDService", "must contain a PDService")
    reports = [_plan(service, model_config) for service in services]
    if output_format is None:
        print("\n\n".join("\n".join(report.lines()) for report in reports))
    else:
        print(render_document({"services": [report.document() for report in reports]}, output_format))
    return 1 if any(report.refused for report in reports) else 0


def _plan_pools(service: PDService, facts: ModelFacts | None) -> tuple[PlannedPool, ...]:
    """Plan each pool: once, or once for each role if an engine's role is fixed at its start."""
    return tuple(
        PlannedPool(pool, role, _plan_pool_engine(service, pool, role, facts))
        for pool in desired_pools(service, ())
        for role in (ROLES[pool.spec.role] if pool.spec.role_fixed_at_start else (None,))
    )


def _read_model_facts(service: PDService, model_config: Path | None) -> tuple[ModelFacts | None, str]:
    """Return the model's facts and the path they were read from; or None and why they are missing.

    Raises:
        InvalidInput: if `model_config` cannot be read, or the file does not describe a model.
    """
    path = model_config or _find_model_config(service)
    if path is None:
        return None, "config.json not found: pass --model-config; what depends on the model is left out"
    path = path / "config.json" if path.is_dir() else path
    return read_model_config(path), str(path)


def _find_model_config(service: PDService) -> Path | None:
    """Return the config.json of the manifest's model on this machine, or the folder with it.

    None if there is none.
    """
    source = service.spec.model_source
    named = Path(source.host_path, source.path) if source and source.host_path else Path(service.spec.model)
    path = named / "config.json"
    return path if path.is_file() else _find_local_model(service.spec.model)


def _find_local_model(model: str) -> Path | None:
    """Return the model that a local run would use for this name; None if there is none."""
    try:
        return None if "/" in model else find_local_model(model)
    except InvalidInput:
        return None


def _plan_pool_engine(
    service: PDService, pool: PDPool, role: Role | None, facts: ModelFacts | None
) -> EnginePlan:
    request = build_launch_request(service, pool.spec, pool_role=pool.spec.role, role=role, facts=facts)
    return plan_engine(request, POD_PLACEMENT)


def _plan(service: PDService, model_config: Path | None) -> ServicePlan:
    if service.spec.engine.is_simulated:
        load_profile(service.spec.engine.profile)  # an unknown profile is refused, as `up` does
        return ServicePlan(service, None, "engine.type is Simulated: there is no model to fit", ())
    facts, source = _read_model_facts(service, model_config)
    return ServicePlan(service, facts, source, _plan_pools(service, facts))
