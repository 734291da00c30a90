from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

from interlock.contrib.django import locks
from interlock.contrib.web.django import urls as locks_page

from . import views

urlpatterns = [
    path("", RedirectView.as_view(url="seats/1")),
    path("seats/<int:pk>", views.show),
    path("seats/<int:pk>/buy", views.buy),
    path("admin/", admin.site.urls),
    path("locks/", include(locks_page(locks, authorize=lambda request: request.user.is_staff and str(request.user)))),
]
