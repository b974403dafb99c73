//! Requests about rules that Python's gate decides: as `http` answers them, for those questions that a gate answers.

use std::net::IpAddr;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};

use crate::api;
use crate::decide::Worker;
use crate::gate::{Asking, Question};
use crate::http::{self, Answered, LARGEST_BODY, Serving};
use crate::metrics::{self, AskedBy};
use crate::readings;
use crate::request::Origin;

const DECIDE_ONLY: &str =
    "by limits in Redis the server answers /v1/decide only: for this call, keep the limits in shm:///NAME?keys=1000000";

/// The thread that answers.
pub struct Gated {
    pub asking: Asking,
    /// Matches rules, and has the limits in the memory of the host: those of bans.
    pub worker: Worker,
    pub serving: Arc<Serving>,
    /// The thread's number.
    pub number: usize,
}

impl Gated {
    /// Answer one request.
    pub async fn answer(&self, peer: Option<IpAddr>, request: Request<Incoming>) -> Answered {
        if let Some((by, description)) = http::proxied(&request) {
            if !self.serving.proxies {
                return http::not_for_proxies();
            }
            let described = http::described(description, self.worker.plan.client.as_ref(), peer, request.headers());
            let described = described.map(|(method, target)| (method.to_owned(), readings::of_target(target)));
            let asked = match described {
                Err(reason) => Err(reason),
                Ok((method, readings)) => {
                    let fields = request.into_parts().0.headers;
                    Ok(self.asking.ask(Question { method, readings, fields, origin: Origin::Peer(peer) }).await)
                }
            };
            return self.serving.decided(self.number, by, asked);
        }
        let method = request.method().clone();
        match (request.uri().path(), &method) {
            (path, _) if path.starts_with("/v1/") => match (api::call_at(path), &method) {
                (Some(call), &Method::POST) => self.asked_in_json(call, peer, request).await,
                (Some(_), _) => http::not_allowed("POST"),
                (None, _) => http::nothing_here(),
            },
            (path, method) => self.serving.page(path, method),
        }
    }

    async fn asked_in_json(&self, by: AskedBy, peer: Option<IpAddr>, request: Request<Incoming>) -> Answered {
        let client = self.worker.plan.client.as_ref();
        if let Err(refusal) = self.serving.access.check(peer, client, request.headers()) {
            self.serving.count(self.number, by, metrics::Result::Refused);
            return http::not_admitted(refusal);
        }
        if !matches!(by, AskedBy::Decide) {
            return self.serving.replied(self.number, by, StatusCode::NOT_IMPLEMENTED, Err(DECIDE_ONLY.to_owned()));
        }
        let data = self.serving.bodies.read(request.into_body(), LARGEST_BODY).await;
        let (status, document) = match data.and_then(|data| api::asked_of_gate(client, &data)) {
            Err((status, reason)) => (status, Err(reason)),
            Ok(question) => (StatusCode::INTERNAL_SERVER_ERROR, api::reply_of_gate(self.asking.ask(question).await)),
        };
        self.serving.replied(self.number, by, status, document)
    }
}
