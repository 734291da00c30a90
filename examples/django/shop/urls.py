from django.contrib import admin
from django.urls import path
from django.views.generic import RedirectView

from . import views

urlpatterns = [
    path("", RedirectView.as_view(url="seats/1")),
    path("seats/<int:pk>", views.show),
    path("seats/<int:pk>/buy", views.buy),
    path("admin/", admin.site.urls),
]
