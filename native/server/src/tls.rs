//! TLS by rustls: a certificate and its key from files, which are read again at SIGHUP, and the handshakes of clients.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{AlertDescription, Error, InvalidMessage, ServerConfig};
use tokio_rustls::server::TlsStream;

use crate::report::Seldom;

/// For a whole handshake, at most.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// In the PEM of a private key with a passphrase.
const ENCRYPTED: [&[u8]; 2] = [b"-----BEGIN ENCRYPTED", b"Proc-Type: 4,ENCRYPTED"];
/// The parser's own error may have the file's text, and that may be a private key.
const IN_PEM: &str = "write its BEGIN line, its text and its END line, each line by itself";

/// What connections over TCP begin with.
pub struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<ServerConfig>>,
    reports: Reports,
}

/// Of handshakes that have failed.
#[derive(Default)]
struct Reports {
    without_tls: Seldom,
    refused: Seldom,
    failed: Seldom,
    slow: Seldom,
}

impl Tls {
    /// Files in PEM: a certificate with those behind it, and its private key.
    pub fn new(certificate: PathBuf, key: PathBuf) -> Result<Tls, String> {
        let current = RwLock::new(configuration(&certificate, &key)?);
        Ok(Tls { certificate, key, current, reports: Reports::default() })
    }

    /// Read the files again, for connections that begin later. After an error, the earlier ones are used further.
    pub fn reload(&self) -> Result<(), String> {
        let read = configuration(&self.certificate, &self.key)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    /// The stream after the handshake; None if that fails, or takes longer than a client may be `idle`.
    pub async fn opened<S>(&self, stream: S, peer: IpAddr, idle: Duration) -> Option<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let current = Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner));
        let time = idle.min(HANDSHAKE_TIME);
        match timeout(time, TlsAcceptor::from(current).accept(stream)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => self.reports.report(peer, &error),
            Err(_) => self.reports.slow.report(|| {
                format!("the TLS handshake of {peer} took longer than {} s, so it was closed", time.as_secs_f64())
            }),
        }
        None
    }
}

impl Reports {
    /// A client that has just gone, as one that only looks for an open port, is none to report.
    fn report(&self, peer: IpAddr, error: &io::Error) {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => self
                .without_tls
                .report(|| format!("{peer} has sent something else than TLS: let it ask by https, or by TLS")),
            Some(Error::AlertReceived(AlertDescription::CertificateExpired)) => self.refused.report(|| {
                format!("{peer} has refused the TLS handshake: the certificate has expired. Renew it, and send SIGHUP")
            }),
            Some(Error::AlertReceived(alert)) => self.refused.report(|| {
                format!("{peer} has refused the TLS handshake: {alert:?}. Does it trust the certificate's issuer?")
            }),
            Some(other) => self.failed.report(|| format!("the TLS handshake of {peer} has failed: {other}")),
            None if error.kind() == ErrorKind::InvalidData => {
                self.failed.report(|| format!("the TLS handshake of {peer} has failed: {error}"));
            }
            None => {}
        }
    }
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    fs::read(file).map_err(|error| format!("{} can't be read: {error}", file.display()))
}

fn configuration(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, String> {
    let (of_certificate, of_key) = (read(certificate)?, read(key)?);
    let chain = CertificateDer::pem_slice_iter(&of_certificate).collect::<Result<Vec<_>, _>>();
    let chain = chain.unwrap_or_default();
    if chain.is_empty() {
        return Err(format!("{} has no certificate in PEM: {IN_PEM}", certificate.display()));
    }
    if ENCRYPTED.iter().any(|sign| of_key.windows(sign.len()).any(|bytes| bytes == *sign)) {
        return Err(format!(
            "{} has a private key with a passphrase, for which the server can't ask: write the key without one",
            key.display()
        ));
    }
    let secret = PrivateKeyDer::from_pem_slice(&of_key);
    let secret = secret.map_err(|_| format!("{} has no private key in PEM: {IN_PEM}", key.display()))?;
    let mut built = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|error| match error {
            Error::InconsistentKeys(_) => {
                format!("{} has no certificate of the key in {}", certificate.display(), key.display())
            }
            other => format!("{} or {} can't be used: {other}", certificate.display(), key.display()),
        })?;
    built.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(built))
}
