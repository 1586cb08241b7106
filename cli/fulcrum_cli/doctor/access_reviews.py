"""Asks the API server which permissions the user and Fulcrum's ServiceAccounts have.

`gather` calls it. The permissions are listed in `permissions`; the checks there judge the results.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fulcrum_cli.doctor.bounded_objects import BoundedObjects
from fulcrum_cli.doctor.facts import Body, ServiceAccountFacts
from fulcrum_cli.doctor.findings import Component
from fulcrum_cli.doctor.permissions import (
    AUTOSCALER_PERMISSIONS,
    OPERATOR_PERMISSIONS,
    USER_PERMISSIONS,
    AccessReview,
    Permission,
    router_permissions,
)
from fulcrum_core.errors import Forbidden, InvalidInput

if TYPE_CHECKING:
    from fulcrum_cluster.objects import ObjectKind


class AccessReviewer:
    """Creates access reviews for one namespace."""

    def __init__(self, objects: BoundedObjects, namespace: str) -> None:
        self._objects, self._namespace = objects, namespace

    async def review_user(self) -> tuple[AccessReview, ...]:
        """Review what status, flip, drain and explain need of the user."""
        from fulcrum_cluster.objects import SELF_SUBJECT_ACCESS_REVIEW

        return await self._review_all(SELF_SUBJECT_ACCESS_REVIEW, USER_PERMISSIONS, {})

    async def review_service_accounts(
        self, operator: Sequence[Body] | None, autoscaler: Sequence[Body] | None, services: Iterable[str]
    ) -> tuple[ServiceAccountFacts, ...]:
        """Review the accounts of operator and autoscaler (by their Deployments) and of all routers."""
        reviews = [
            self._review_account(component, service_account_of(deployments[0]), permissions)
            for component, deployments, permissions in (
                (Component.OPERATOR, operator, OPERATOR_PERMISSIONS),
                (Component.AUTOSCALER, autoscaler, AUTOSCALER_PERMISSIONS),
            )
            if deployments
        ]
        for service in services:
            account = (self._namespace, f"{service}-router")
            permissions = router_permissions(service)
            reviews.append(self._review_account(Component.ROUTER, account, permissions, service=service))
        return tuple(await asyncio.gather(*reviews))

    async def _review_account(
        self,
        component: Component,
        account: tuple[str, str],
        permissions: Sequence[Permission],
        *,
        service: str = "",
    ) -> ServiceAccountFacts:
        namespace, name = account
        subject = {
            "user": f"system:serviceaccount:{namespace}:{name}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
                "system:authenticated",
            ],
        }
        return ServiceAccountFacts(
            component=component,
            account=f"{namespace}/{name}",
            access_reviews=await self._review_all(_subject_access_review(), permissions, subject),
            service=service,
        )

    async def _review_all(
        self, kind: "ObjectKind", permissions: Sequence[Permission], subject: Mapping[str, Any]
    ) -> tuple[AccessReview, ...]:
        return tuple(
            await asyncio.gather(*(self._review(kind, permission, subject) for permission in permissions))
        )

    async def _review(
        self, kind: "ObjectKind", permission: Permission, subject: Mapping[str, Any]
    ) -> AccessReview:
        attributes = {
            "namespace": self._namespace,
            "verb": permission.verb,
            "group": permission.group,
            "resource": permission.resource,
            "subresource": permission.subresource,
            "name": permission.name,
        }
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {},
            "spec": {
                **subject,
                "resourceAttributes": {key: value for key, value in attributes.items() if value},
            },
        }
        try:
            review = await self._objects.create(kind, body, namespace="")
        except (Forbidden, InvalidInput):
            return AccessReview(permission, None)
        return AccessReview(permission, bool(review["status"].get("allowed")))


def service_account_of(deployment: Body) -> tuple[str, str]:
    """Return namespace and name of the ServiceAccount of the Deployment's pods."""
    spec = deployment["spec"]["template"]["spec"]
    return deployment["metadata"]["namespace"], spec.get("serviceAccountName", "default")


def _subject_access_review() -> "ObjectKind":
    from fulcrum_cluster.objects import ObjectKind

    plural = "subjectaccessreviews"
    return ObjectKind("authorization.k8s.io/v1", plural, "SubjectAccessReview", namespaced=False)
