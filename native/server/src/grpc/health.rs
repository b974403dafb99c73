//! `grpc.health.v1.Health`.

use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;
use tonic::server::ServerStreamingService;

use super::messages::health::{HealthCheckRequest, HealthCheckResponse, ServingStatus};
use super::{AUTHORIZATION, HEALTH, RATE_LIMITS};
use crate::http::Serving;
use crate::report::shown;

/// The calls of `Watch` in one connection, which isn't idle as long as there is one. Each has a reference.
#[derive(Default)]
pub struct Watchers(Arc<()>);

impl Watchers {
    pub fn is_empty(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

/// "" is the whole server.
fn is_known(service: &str) -> bool {
    ["", RATE_LIMITS, AUTHORIZATION, HEALTH].contains(&service)
}

fn reply(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

fn reply_while(ending: bool) -> HealthCheckResponse {
    reply(if ending { ServingStatus::NotServing } else { ServingStatus::Serving })
}

pub fn check(serving: &Serving, asked: &HealthCheckRequest) -> Result<HealthCheckResponse, Status> {
    if !is_known(&asked.service) {
        return Err(Status::not_found(format!("the server has no service {}", shown(&asked.service))));
    }
    Ok(reply_while(*serving.stop.borrow()))
}

/// The method `Watch`: the status now, and each other one, until the server ends.
pub struct Watch<'a> {
    pub serving: &'a Serving,
    pub watchers: &'a Watchers,
}

impl ServerStreamingService<HealthCheckRequest> for Watch<'_> {
    type Response = HealthCheckResponse;
    type ResponseStream = Statuses;
    type Future = Ready<Result<tonic::Response<Statuses>, Status>>;

    fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
        let is_known = is_known(&request.get_ref().service);
        let ending = WatchStream::new(self.serving.stop.clone());
        let each: Each = if is_known {
            Box::pin(ending.map(|ending| Ok(reply_while(ending))))
        } else {
            // By the protocol, the stream stays open: the service may come.
            let mut unknown = Some(reply(ServingStatus::ServiceUnknown));
            Box::pin(ending.filter_map(move |_| unknown.take().map(Ok)))
        };
        ready(Ok(tonic::Response::new(Statuses { each, _watcher: Arc::clone(&self.watchers.0) })))
    }
}

type Each = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

pub struct Statuses {
    each: Each,
    _watcher: Arc<()>,
}

impl Stream for Statuses {
    type Item = Result<HealthCheckResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.each.as_mut().poll_next(context)
    }
}
