from django.urls import path
from shop import views

urlpatterns = [
    path("who", views.who),
    path("orders/<int:number>", views.orders),
    path("buy/<int:pk>", views.buy),
    path("careless/<int:pk>", views.careless),
    path("lose/<int:pk>", views.lose),
    path("busy/<str:name>", views.busy),
    path("abusy/<str:name>", views.abusy),
    path("ahold/<str:name>", views.ahold),
    path("broken", views.broken),
]
